"""Sessions of operators: begin, find by the cookie's key, list and revoke. Knows no Flask.

The cookie holds a random key, the row its digest. The database's clock decides when a session ends.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import ColumnElement, case, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.db.statements import change_rows, insert_row
from aijobs.ids import new_id
from aijobs.logs import get_logger
from aijobs.operators.audit import OPERATOR, AuditTrail
from aijobs.operators.models import Operator, OperatorSession
from aijobs.settings import Settings

logger = get_logger(__name__)

SEEN_EVERY = timedelta(minutes=1)
"""Minimum time between two writes of `seen_at`."""

REVOKE_SESSION = "operator.revoke_session"

_LISTED = (
    OperatorSession.id,
    Operator.username,
    OperatorSession.created_at,
    OperatorSession.seen_at,
    OperatorSession.remote_addr,
    OperatorSession.user_agent,
)


class Ended(StrEnum):
    """Why a session has ended."""

    REVOKED = "revoked"
    IDLE = "idle"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    """There is no such session, or its row was deleted."""


@dataclass(frozen=True)
class SessionRow:
    """A session for lists."""

    id: str
    username: str
    created_at: datetime
    seen_at: datetime
    remote_addr: str | None
    user_agent: str | None
    ended: str | None
    """`idle` or `expired` by the settings of the process that asks; None for a good one."""


class FoundSession(NamedTuple):
    """The session of a key. `ended` is None for a good one; `stale`: `seen_at` may be written again."""

    operator: Operator
    id: str
    ended: Ended | None
    stale: bool


class SessionRules:
    """When sessions end, as conditions on their rows."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.clock = clock
        self.idle = timedelta(hours=settings.session_idle_hours)
        self.longest = timedelta(days=settings.session_max_days)

    def is_idle(self) -> ColumnElement[bool]:
        """Return the condition that the session was unused for too long."""
        return OperatorSession.seen_at <= self.clock.now(-self.idle)

    def is_expired(self) -> ColumnElement[bool]:
        """Return the condition that the session began too long ago, even if it is used."""
        return OperatorSession.created_at <= self.clock.now(-self.longest)

    def ended(self) -> ColumnElement[str | None]:
        """Return the expression for `expired` or `idle`; NULL if the session is neither."""
        return case((self.is_expired(), Ended.EXPIRED.value), (self.is_idle(), Ended.IDLE.value))

    def is_good(self) -> ColumnElement[bool]:
        """Return the condition that the session is neither revoked, idle nor expired."""
        return OperatorSession.revoked_at.is_(None) & ~self.is_idle() & ~self.is_expired()


class OperatorSessions:
    """The sessions behind the cookies."""

    def __init__(self, database: Database, rules: SessionRules) -> None:
        self._database, self._rules = database, rules

    def begin(self, operator: Operator, remote_addr: str | None, user_agent: str | None) -> str | None:
        """Insert a session of an operator whose password was right; return its key, for the cookie.

        None if the operator was disabled or given another password since `operator` was read: that change revoked all
        sessions, and it locks the same row, so this one can't come after it.
        """
        key, session_id, now = secrets.token_urlsafe(32), new_id(), self._rules.clock.now()

        def work(session: Session) -> bool:
            same = (Operator.id == operator.id, Operator.password_hash == operator.password_hash)
            good = select(Operator.id).where(*same, Operator.active).with_for_update()
            if session.execute(good).scalar_one_or_none() is None:
                return False
            insert_row(
                session,
                OperatorSession,
                id=session_id,
                operator_id=operator.id,
                key_hash=_digest(key),
                created_at=now,
                seen_at=now,
                remote_addr=remote_addr,
                user_agent=user_agent,
            )
            return True

        def confirm(session: Session) -> bool | None:
            return True if session.get(OperatorSession, session_id) is not None else None

        return key if self._database.write(work, confirm=confirm) else None

    def find(self, key: str) -> FoundSession | None:
        """Return the session of a key, even if it has ended; None if there is no such row."""
        rules = self._rules
        ended = case(
            (OperatorSession.revoked_at.is_not(None) | ~Operator.active, Ended.REVOKED.value),
            else_=rules.ended(),
        )
        stale = OperatorSession.seen_at <= rules.clock.now(-SEEN_EVERY)
        query = (
            select(Operator, OperatorSession.id, ended, stale)
            .join(OperatorSession, OperatorSession.operator_id == Operator.id)
            .where(OperatorSession.key_hash == _digest(key))
        )
        with self._database.read() as reading:
            row = reading.execute(query).one_or_none()
        return FoundSession(row[0], row[1], Ended(row[2]) if row[2] else None, bool(row[3])) if row else None

    def note_seen(self, session_id: str) -> None:
        """Write `seen_at`. A failure is only logged: at worst the session ends earlier."""
        use = update(OperatorSession).where(OperatorSession.id == session_id).values(seen_at=self._rules.clock.now())
        try:
            self._database.write(lambda session: session.execute(use), tries=1)
        except SQLAlchemyError as error:  # An exhausted pool raises no DBAPIError.
            logger.warning("operator.session_use_unnoted", error=type(error).__name__)


def _digest(key: str) -> str:
    """Return the SHA-256 digest. A key is 256 random bits, so no slow hash is needed. The digest also keeps the time
    of a look-up from revealing anything about the key.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def list_sessions(
    session: Session, rules: SessionRules, *which: ColumnElement[bool], limit: int | None = None
) -> list[SessionRow]:
    """Return at most `limit` sessions that match `which` and aren't revoked, the one used last first."""
    query = (
        select(*_LISTED, rules.ended())
        .join(Operator, Operator.id == OperatorSession.operator_id)
        .where(OperatorSession.revoked_at.is_(None), Operator.active, *which)
        .order_by(OperatorSession.seen_at.desc(), OperatorSession.id)
        .limit(limit)
    )
    return [SessionRow(*row) for row in session.execute(query)]


def revoke_session(
    session: Session, trail: AuditTrail, clock: Clock, session_id: str, *which: ColumnElement[bool]
) -> bool | None:
    """Revoke one session, with an audit row. False if it was already revoked; None if none matches id and `which`."""
    query = (
        select(OperatorSession.remote_addr, Operator.username)
        .join(Operator, Operator.id == OperatorSession.operator_id)
        .where(OperatorSession.id == session_id, *which)
    )
    found = session.execute(query).one_or_none()
    if found is None:
        return None
    if not _revoke(session, clock.now(), OperatorSession.id == session_id):
        return False
    details = {"sessionId": session_id, "remoteAddr": found.remote_addr}
    session.add(trail.row(REVOKE_SESSION, OPERATOR, found.username, after=details))
    return True


def revoke_sessions(
    session: Session, trail: AuditTrail, clock: Clock, operator_id: str, username: str, *which: ColumnElement[bool]
) -> int:
    """Revoke an operator's sessions that match `which`, with one audit row for all. Return how many.

    Sessions that are too old by this process's settings are included, because the web processes may have others.
    """
    count = _revoke(session, clock.now(), OperatorSession.operator_id == operator_id, *which)
    if count:
        session.add(trail.row(REVOKE_SESSION, OPERATOR, username, after={"sessions": count}))
    return count


def revoke_all(session: Session, operator: Operator, now: datetime) -> None:
    """Revoke every session of an operator. The caller's change has an audit row, so the sessions get none."""
    operator.session_version += 1  # For web processes of the previous version. A later migration drops it.
    session.flush()  # Lock the operator's row first, as `begin` does.
    _revoke(session, now, OperatorSession.operator_id == operator.id)


def _revoke(session: Session, now: datetime | ColumnElement[datetime], *which: ColumnElement[bool]) -> int:
    revoked = update(OperatorSession).where(OperatorSession.revoked_at.is_(None), *which).values(revoked_at=now)
    return change_rows(session, revoked)
