"""For runtime services that call providers themselves: a user's key in clear, by the service token.

Without a token in the settings there is no such address. Operators have no way here: a session or an operator's token
is as good as none.
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
    """`{credentialId, userId, mode, apiKey}`. Each use has its audit row, committed before the key is looked for."""
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
    """Add the address to `app`, where the settings hold a service token."""
    if not app.extensions["aijobs"].settings.service_token:
        return
    blueprint = Blueprint("internal_api", __name__)
    blueprint.before_request(_authenticate)
    blueprint.add_url_rule(RESOLVE, view_func=resolve_credential, methods=["POST"])
    app.register_blueprint(blueprint)


def _authenticate() -> None:
    """`UNAUTHORIZED` unless the request bears the token. Digests are compared, so that nothing is told by the time it
    takes, not even a length. A refusal leaves a line, and no audit row: rows could be written by anybody.
    """
    given = token_digest(bearer_token() or "")
    if not hmac.compare_digest(given, token_digest(services().settings.service_token)):
        if (held_back := _sparing.may_say("refused")) is not None:
            logger.warning("internal.token_refused", alsoRefused=held_back)
        raise ApiError("UNAUTHORIZED")
