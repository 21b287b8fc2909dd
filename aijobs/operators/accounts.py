"""Create, disable and enable operators, set passwords, revoke tokens and sessions. Each with its audit row.

The change and its audit row are one transaction, in the caller's session. Changes raise `NoSuchOperator` for an unknown
operator.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.clock import iso, utc_now
from aijobs.db.clock import Clock
from aijobs.errors import AijobsError
from aijobs.operators.audit import OPERATOR as TARGET
from aijobs.operators.audit import AuditTrail
from aijobs.operators.models import Operator, OperatorSession, OperatorToken
from aijobs.operators.sessions import revoke_all, revoke_session, revoke_sessions
from aijobs.texts import line_fault

LONGEST_USERNAME = 100


class NoSuchOperator(AijobsError):
    """There is no such operator, or none with such a token."""


def username_fault(text: str) -> str | None:
    """Return why a username is invalid, or None."""
    return line_fault(text, LONGEST_USERNAME)


def find_operator(session: Session, username: str) -> Operator | None:
    """Return the operator of that name. An invalid name is not looked up."""
    return None if username_fault(username) else session.scalar(select(Operator).where(Operator.username == username))


def get_operator(session: Session, username: str) -> Operator:
    """Return the operator of that name; `NoSuchOperator`."""
    operator = find_operator(session, username)
    if operator is None:
        raise NoSuchOperator(f"there is no operator {username!r}")
    return operator


def create_operator(session: Session, trail: AuditTrail, username: str, password_hash: str, role: str) -> Operator:
    """Insert an operator. `IntegrityError` if the name is taken."""
    operator = Operator(username=username, password_hash=password_hash, role=role, created_at=utc_now())
    operator.active = True
    session.add(operator)
    session.flush()
    session.add(trail.row("operator.create", TARGET, username, after=_state(operator)))
    return operator


def set_active(session: Session, trail: AuditTrail, username: str, active: bool) -> bool:
    """Disable or enable an operator, and return whether it changed. Disabling ends sessions and tokens at once.

    Tokens that weren't revoked work again when the operator is enabled; sessions don't.
    """
    operator = get_operator(session, username)
    if operator.active == active:
        return False
    before = _state(operator)
    operator.active = active
    if not active:
        revoke_all(session, operator, utc_now())
    action = "operator.enable" if active else "operator.disable"
    session.add(trail.row(action, TARGET, username, before=before, after=_state(operator)))
    return True


def set_password(session: Session, trail: AuditTrail, username: str, password_hash: str) -> None:
    """Set a new password, which ends all sessions. Tokens stay."""
    operator = get_operator(session, username)
    operator.password_hash = password_hash
    revoke_all(session, operator, utc_now())
    session.add(trail.row("operator.password", TARGET, username, after={"sessionsEnded": True}))


def add_token(
    session: Session, trail: AuditTrail, username: str, digest: str, label: str, expires_at: datetime
) -> OperatorToken:
    """Insert a token of an operator; only its digest is stored. `NoSuchOperator` for a disabled one too."""
    operator = get_operator(session, username)
    if not operator.active:
        raise NoSuchOperator(f"operator {username!r} is disabled")
    token = OperatorToken(
        operator_id=operator.id, token_hash=digest, label=label, created_at=utc_now(), expires_at=expires_at
    )
    session.add(token)
    session.flush()
    details = {"tokenId": token.id, "label": label, "expiresAt": iso(expires_at)}
    session.add(trail.row("operator.token", TARGET, username, after=details))
    return token


def revoke_tokens(session: Session, trail: AuditTrail, username: str, token_id: str | None) -> int:
    """Revoke one token of an operator, or (None) all. Return how many weren't revoked until now.

    `NoSuchOperator` if the operator has no such token.
    """
    operator = get_operator(session, username)
    tokens = session.scalars(select(OperatorToken).where(OperatorToken.operator_id == operator.id)).all()
    meant = [token for token in tokens if token_id in (None, token.id)]
    if token_id is not None and not meant:
        raise NoSuchOperator(f"operator {username!r} has no token {token_id!r}")
    good = [token for token in meant if token.revoked_at is None]
    for token in good:
        token.revoked_at = utc_now()
        details = {"tokenId": token.id, "label": token.label}
        session.add(trail.row("operator.revoke_token", TARGET, username, after=details))
    return len(good)


def revoke_operator_sessions(
    session: Session, trail: AuditTrail, clock: Clock, username: str, session_id: str | None
) -> int:
    """Revoke one session of an operator, or (None) all. Return how many weren't revoked until now.

    `NoSuchOperator` if the operator has no such session.
    """
    operator = get_operator(session, username)
    if session_id is None:
        return revoke_sessions(session, trail, clock, operator.id, username)
    revoked = revoke_session(session, trail, clock, session_id, OperatorSession.operator_id == operator.id)
    if revoked is None:
        raise NoSuchOperator(f"operator {username!r} has no session {session_id!r}")
    return int(revoked)


def _state(operator: Operator) -> dict[str, Any]:
    return {"role": operator.role, "active": operator.active}
