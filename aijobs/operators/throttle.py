"""Throttle wrong passwords. They are counted in the audit log, which all web processes share."""

from __future__ import annotations

import hashlib
from datetime import timedelta

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.errors import ApiError
from aijobs.monitor.counts import capped_count
from aijobs.operators.audit import LOGIN
from aijobs.operators.models import AuditLog, Operator

WINDOW = timedelta(minutes=5)
PER_USER_AND_ADDRESS = 5
PER_USER = 50
"""Limit for all addresses together, against guesses by many machines. Much higher, so that nobody can easily lock an
operator out.
"""
PER_ADDRESS = 30

FAILED = "login_failed"
SUCCEEDED = "login"


class LoginAttempts:
    """The attempts to sign in as one username from one address."""

    def __init__(self, database: Database, clock: Clock, known: str | None, typed: str, address: str | None) -> None:
        self._database, self._clock = database, clock
        # People type passwords into the wrong field, so an invalid name is stored as a digest.
        digest = hashlib.sha256(typed.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        self._name = known if known is not None else f"?{digest}"
        self._address = address or "unknown"

    def check(self) -> None:
        """Raise `RATE_LIMITED` after too many wrong passwords within the last minutes."""
        with self._database.read() as session:
            here = self._count_of_name(session, PER_USER_AND_ADDRESS, AuditLog.remote_addr == self._address)
            anywhere = self._count_of_name(session, PER_USER)
            # The address needs no index: few rows are this young, and they are found by time.
            address = self._count(session, PER_ADDRESS, AuditLog.remote_addr == self._address)
        if here >= PER_USER_AND_ADDRESS or anywhere >= PER_USER or address >= PER_ADDRESS:
            raise ApiError("RATE_LIMITED", retry_after=WINDOW)

    def record_failure(self) -> None:
        """Record a wrong password."""
        self._database.write(lambda session: session.add(self._row(FAILED)))

    def record_success(self, operator_id: str) -> None:
        """Record a sign-in. The wrong passwords before it don't count any more."""

        def work(session: Session) -> None:
            row = self._row(SUCCEEDED)
            row.operator_id = operator_id
            session.add(row)
            operator = session.get(Operator, operator_id)
            if operator is not None:
                operator.last_login_at = self._clock.now()

        self._database.write(work)

    def _row(self, action: str) -> AuditLog:
        return AuditLog(
            actor=f"operator:{self._name}" if action == SUCCEEDED else "anonymous",
            action=action,
            target_type=LOGIN,
            target_id=self._name,
            remote_addr=self._address,
            at=self._clock.now(),
        )

    def _count_of_name(self, session: Session, enough: int, *where_from: ColumnElement[bool]) -> int:
        """Return the number of wrong passwords for this name since its last right one, at most `enough`."""
        mine = (AuditLog.target_type == LOGIN, AuditLog.target_id == self._name, *where_from)
        young = AuditLog.at > self._clock.now(-WINDOW)
        last_right = select(func.max(AuditLog.at)).where(*mine, young, AuditLog.action == SUCCEEDED).scalar_subquery()
        return self._count(session, enough, *mine, AuditLog.at > func.coalesce(last_right, self._clock.now(-WINDOW)))

    def _count(self, session: Session, enough: int, *which: ColumnElement[bool]) -> int:
        """Return the number of wrong passwords within the last minutes, at most `enough`."""
        young = AuditLog.at > self._clock.now(-WINDOW)
        count = capped_count(AuditLog, AuditLog.action == FAILED, young, *which, cap=enough)
        return int(session.execute(select(count)).scalar_one())
