"""The API for runtime services that call providers themselves: a user's decrypted key, with the service token.

The route exists only if the settings have a token. Sessions and tokens of operators are refused.
"""

from __future__ import annotations

import hmac

from flask import Blueprint, Flask, Response, request

from aijobs.errors import ApiError
from aijobs.logs import Sparing, get_logger
from aijobs.monitor.monitor import is_id
from aijobs.operators.audit import CREDENTIAL, Actor, AuditTrail
from aijobs.web.api.answers import answer
from aijobs.web.auth import bearer_token, token_digest
from aijobs.web.context import client_address, printable, services
from aijobs.web.requests import read_no_parameters, read_optional_object

logger = get_logger(__name__)

RESOLVE = "/internal/credentials/<credential_id>/resolve"
ACTOR = "service"
_sparing = Sparing()


def resolve_credential(credential_id: str) -> Response:
    """Return `{credentialId, userId, mode, apiKey}`. Each use has its audit row, committed before the key is read."""
    read_no_parameters()
    read_optional_object(())
    if not is_id(credential_id):
        raise ApiError("NOT_FOUND")
    actor = Actor(ACTOR, None, client_address(), printable(request.headers.get("User-Agent", ""), 300))
    trail = AuditTrail(services().database, services().clock, actor)
    with trail.entry("credential.resolve", CREDENTIAL, credential_id, reason=None, before={}) as entry:
        found = services().credentials.resolve(credential_id)
        entry.after = {"userId": found.user_id, "mode": found.mode}
    return answer(
        {"credentialId": found.credential_id, "userId": found.user_id, "mode": found.mode, "apiKey": found.api_key}
    )


def init_app(app: Flask) -> None:
    """Add the route to `app`, if the settings have a service token."""
    if not app.extensions["aijobs"].settings.service_token:
        return
    blueprint = Blueprint("internal_api", __name__)
    blueprint.before_request(_authenticate)
    blueprint.add_url_rule(RESOLVE, view_func=resolve_credential, methods=["POST"])
    app.register_blueprint(blueprint)


def _authenticate() -> None:
    """Raise `UNAUTHORIZED` unless the request has the token.

    Digests are compared, so that the time reveals nothing, not even the length. A refusal is logged without an audit
    row, because anybody could write rows that way.
    """
    given = token_digest(bearer_token() or "")
    if not hmac.compare_digest(given, token_digest(services().settings.service_token)):
        if (held_back := _sparing.may_say("refused")) is not None:
            logger.warning("internal.token_refused", alsoRefused=held_back)
        raise ApiError("UNAUTHORIZED")
