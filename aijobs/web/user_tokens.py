"""The learning app's tokens: JWT, HS256; `sub` is the user."""

from __future__ import annotations

import jwt
from flask import g, request

from aijobs.canonical import identifier_fault
from aijobs.errors import ApiError
from aijobs.settings import Settings
from aijobs.web.auth import bearer_token
from aijobs.web.context import services

ALGORITHM = "HS256"
_LEEWAY_S = 10
_LONGEST = 8192


def find_user_id(token: str, settings: Settings) -> str | None:
    """Return the user of a valid token; None for any other text.

    A valid token has `exp`, `sub` and the configured audience. The algorithm that the token names is ignored.
    """
    if len(token) > _LONGEST:
        return None
    try:
        claims = jwt.decode(
            token,
            settings.jwt_secret,
            algorithms=[ALGORITHM],
            audience=settings.jwt_audience or None,
            leeway=_LEEWAY_S,
            options={"require": ["exp", "sub"], "verify_aud": bool(settings.jwt_audience)},
        )
    except (jwt.PyJWTError, ValueError, OverflowError, TypeError, RecursionError):
        return None
    subject = claims["sub"]
    return subject if isinstance(subject, str) and identifier_fault(subject) is None else None


def get_user_id() -> str:
    """Return the user of this request; `UNAUTHORIZED` without a valid token."""
    if "user_id" not in g:
        token = bearer_token()
        user_id = find_user_id(token, services().settings) if token else None
        if user_id is None:
            raise ApiError("UNAUTHORIZED")
        g.user_id = user_id
    return str(g.user_id)


def is_user_request() -> bool:
    """Return whether this request has a valid token of a user."""
    token = bearer_token() if "Authorization" in request.headers else None
    return token is not None and find_user_id(token, services().settings) is not None
