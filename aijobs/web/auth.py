"""Operators: passwords, sessions, tokens and rights. The role is read from the database at each request."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar, cast

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from flask import Flask, abort, g, redirect, request, session, url_for
from flask_login import LoginManager, UserMixin, current_user, login_user, logout_user
from sqlalchemy import or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.routing import BuildError

from aijobs.errors import ApiError
from aijobs.logs import fault, get_logger
from aijobs.operators.accounts import find_operator
from aijobs.operators.audit import Actor, AuditTrail
from aijobs.operators.models import Operator, OperatorToken
from aijobs.operators.rights import may
from aijobs.operators.sessions import Ended, OperatorSessions, SessionRules, revoke_session
from aijobs.operators.throttle import LoginAttempts
from aijobs.web.context import client_address, is_api_request, printable, requested_address, services

logger = get_logger(__name__)

V = TypeVar("V", bound=Callable[..., Any])

TOKEN_PREFIX = "ajo_"  # noqa: S105 - how an operator's token begins, not a token
LOGIN_ENDPOINT = "console.login"
LONGEST_PASSWORD = 1024
USE_NOTED_EVERY = timedelta(hours=1)
"""Minimum time between two writes of a token's `last_used_at`."""

POLLERS = frozenset({"poller", "chips"})
"""Ids of elements that poll, as htmx names them in `HX-Trigger`. Polls don't count as use of a session."""

login_manager = LoginManager()
login_manager.session_protection = None  # It would write the cookie at each change of address, and nothing reads it.
_hasher = PasswordHasher()
_DUMMY_HASH = _hasher.hash(secrets.token_hex(16))
"""Verified for unknown users, so that the answer takes as long as for known ones."""


@dataclass(frozen=True)
class OperatorUser(UserMixin):
    """The operator of this request, as read at its beginning."""

    id: str
    username: str
    role: str
    language: str | None
    session_id: str | None = None
    """The session of this request; None with a token."""
    session_key: str = field(default="", repr=False)

    def get_id(self) -> str:
        """Return the id for the cookie."""
        return self.session_key

    def may(self, right: str) -> bool:
        """Return whether this operator has the right (`aijobs.operators.rights`)."""
        return may(self.role, right)

    @property
    def actor(self) -> str:
        """The operator's name in history and audit log."""
        return f"operator:{self.username}"

    @classmethod
    def of(cls, row: Operator, session_id: str | None = None, session_key: str = "") -> OperatorUser:
        return cls(row.id, row.username, row.role, row.language, session_id, session_key)


# --- passwords and tokens ------------------------------------------------------------------------------------


def hash_password(password: str) -> str:
    """Return an argon2id hash of `password`."""
    return _hasher.hash(password.encode("utf-8", "surrogatepass"))


def verify_password(password_hash: str | None, password: str) -> bool:
    """Return whether the password is right. Without a hash it takes as long, and returns False."""
    try:
        given = password[:LONGEST_PASSWORD].encode("utf-8", "surrogatepass")
        return _hasher.verify(password_hash or _DUMMY_HASH, given) and password_hash is not None
    except (VerificationError, InvalidHashError):
        return False


def make_operator_token() -> tuple[str, str]:
    """Return a new token, to be shown once, and its digest, to be stored."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return token, token_digest(token)


def token_digest(token: str) -> str:
    """Return the SHA-256 digest. A token is 256 random bits, so no slow hash is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


# --- signing in ----------------------------------------------------------------------------------------------


def sign_in(username: str, password: str) -> OperatorUser | None:
    """Check the password and begin a session; None if username or password is wrong.

    `RATE_LIMITED` with `retry_after` after too many wrong ones, even if this one is right.
    """
    database, clock = services().database, services().clock
    with database.read() as reading:
        row = find_operator(reading, username)
    attempts = LoginAttempts(database, clock, row.username if row else None, username, client_address())
    attempts.check()
    right = verify_password(row.password_hash if row else None, password)
    key = sessions().begin(row, client_address(), user_agent()) if row is not None and right else None
    if row is None or key is None:
        attempts.record_failure()
        return None
    user = OperatorUser.of(row, session_key=key)
    # Start with a new session: neither its old id nor its CSRF token is kept.
    session.clear()
    session.permanent = True
    login_user(user)
    if row.language:
        session["language"] = row.language
    attempts.record_success(row.id)
    return user


def sign_out() -> None:
    """End this session, also for a copy of its cookie."""
    operator = current_operator()
    if operator is not None and operator.session_id is not None:
        s, this = services(), operator.session_id
        trail = AuditTrail(s.database, s.clock, acting())
        s.database.write(lambda writing: revoke_session(writing, trail, s.clock, this))
    logout_user()
    session.clear()


def session_rules() -> SessionRules:
    """Return the rules of sessions from the settings."""
    return SessionRules(services().settings, services().clock)


def sessions() -> OperatorSessions:
    """Return the sessions of operators."""
    return OperatorSessions(services().database, session_rules())


@login_manager.user_loader
def _load_user(key: str) -> OperatorUser | None:
    found = sessions().find(key)
    if found is None or found.ended is not None:
        g.session_ended = found.ended if found is not None else Ended.UNKNOWN
        return None
    if found.stale and request.headers.get("HX-Trigger") not in POLLERS:
        sessions().note_seen(found.id)
    return OperatorUser.of(found.operator, found.id, key)


def ended_session() -> Ended | None:
    """Return why the session of this request's cookie has ended; None if it is good, or if there was none."""
    current_operator()
    return cast("Ended | None", g.get("session_ended"))


def find_token_operator(token: str) -> OperatorUser | None:
    """Return the operator of a token; None if it is unknown, revoked or expired."""
    if not token.startswith(TOKEN_PREFIX) or len(token) > 200:
        return None
    clock = services().clock
    unnoted = or_(OperatorToken.last_used_at.is_(None), OperatorToken.last_used_at < clock.now(-USE_NOTED_EVERY))
    query = (
        select(Operator, OperatorToken.id, unnoted)
        .join(OperatorToken, OperatorToken.operator_id == Operator.id)
        .where(
            OperatorToken.token_hash == token_digest(token),
            OperatorToken.revoked_at.is_(None),
            or_(OperatorToken.expires_at.is_(None), OperatorToken.expires_at > clock.now()),
        )
    )
    with services().database.read() as reading:
        found = reading.execute(query).one_or_none()
    if found is None or not found[0].active:
        return None
    operator, token_id, worth_noting = found
    if worth_noting:
        _note_use(token_id)
    return OperatorUser.of(operator)


def _note_use(token_id: str) -> None:
    """Record the use of a token. A failure is only logged: operators may still read if the database takes no writes."""
    use = update(OperatorToken).where(OperatorToken.id == token_id).values(last_used_at=services().clock.now())
    try:
        services().database.write(lambda session: session.execute(use))
    except SQLAlchemyError as error:  # An exhausted pool raises no DBAPIError.
        logger.warning("operator.token_use_unnoted", **fault(error))


def bearer_token() -> str | None:
    """Return the token of the request's `Authorization: Bearer …` header, or None."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


# --- rights --------------------------------------------------------------------------------------------------


def current_operator() -> OperatorUser | None:
    """Return the operator of this request: of its token in the admin API, otherwise of its session. None: not signed
    in.
    """
    if "operator" in g:
        return cast("OperatorUser | None", g.operator)
    return cast("OperatorUser", current_user) if current_user.is_authenticated else None


def get_operator() -> OperatorUser:
    """Return the operator of this request; `UNAUTHORIZED` if nobody is signed in."""
    operator = current_operator()
    if operator is None:
        raise ApiError("UNAUTHORIZED")
    return operator


def acting() -> Actor:
    """Return the operator of this request as an actor; `UNAUTHORIZED` if nobody is signed in."""
    operator = get_operator()
    return Actor(operator.actor, operator.id, client_address(), user_agent())


def user_agent() -> str | None:
    """Return the browser's user agent, cut to the column's length."""
    return printable(request.headers.get("User-Agent", ""), 300)


def require_right(right: str) -> Callable[[V], V]:
    """Restrict a view to operators with `right`. Not signed in: 401, or in the console the login; without the right:
    403.
    """

    def decorate(view: V) -> V:
        @wraps(view)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            operator = current_operator()
            if operator is None:
                return login_manager.unauthorized()
            if not operator.may(right):
                raise ApiError("FORBIDDEN", {"right": right})
            return view(*args, **kwargs)

        return cast(V, guarded)

    return decorate


@login_manager.unauthorized_handler
def _unauthorized() -> Any:
    """Return 401 in the API; in the console the login page, which leads back to the page."""
    if is_api_request():
        raise ApiError("UNAUTHORIZED")
    try:
        htmx = request.headers.get("HX-Request") == "true"
        back = request.headers.get("HX-Current-URL", "") if htmx else requested_address()
        login = url_for(LOGIN_ENDPOINT, next=_path_of(back) if request.method == "GET" or htmx else None)
    except BuildError:
        abort(401)
    if htmx:
        return "", 401, {"HX-Redirect": login}
    return redirect(login, 303)


def _path_of(address: str) -> str | None:
    """Return path and query of a URL of this site; None for another one."""
    root = request.host_url.rstrip("/")
    return address.removeprefix(root) if address.startswith((root + "/", "/")) else None


def init_app(app: Flask) -> None:
    """Load the operator of each request."""
    login_manager.init_app(app)
