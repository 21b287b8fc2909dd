"""A database with injected commit failures: it raises the driver's errors, and the product retries as usual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from aijobs.db.database import Actions, Base, CommitUnknown, Database
from tests.statemachine.flows import COMMIT, Died, stop, this_flow
from tests.support.crash_points import AFTER_COMMIT, BEFORE_COMMIT

T = TypeVar("T")

LOST_BEFORE = "lost_before"
"""The connection is lost before COMMIT arrives: nothing is written, but the client can't know."""
LOST_AFTER = "lost_after"
"""COMMIT takes effect and its answer is lost."""
AGAIN = "again"
"""The database rejects the transaction and expects a retry (deadlock, lock timeout, database is locked)."""
AWAY = "away"
"""The database is unreachable during all retries of this unit of work."""

FAULTS = (LOST_AFTER, BEFORE_COMMIT, AFTER_COMMIT, LOST_BEFORE, AGAIN, AWAY)
"""At a crash point the process ends."""

_REPEAT_ME: dict[str, tuple[Any, ...]] = {
    "sqlite": ("database is locked",),
    "mysql": (1213, "Deadlock found"),
    "mariadb": (1213, "Deadlock found"),
    "postgresql": ("deadlock detected",),
}


class FaultyDatabase(Database):
    """A `Database` whose flows stop before each commit and may receive one of `FAULTS` there."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        dialect = self.engine.dialect
        driver_error: type[Exception] = dialect.loaded_dbapi.OperationalError
        self._lost = type("ConnectionLost", (driver_error,), {})
        self._asks_again = type("AsksAgain", (driver_error,), {"sqlstate": "40P01"})
        self._words = _REPEAT_ME[dialect.name]
        self._armed: str | None = None
        self._really_commit = dialect.do_commit
        dialect.do_commit = self._commit  # type: ignore[method-assign,assignment]
        event.listen(self.engine, "handle_error", self._tell_lost_connections)
        if dialect.name == "sqlite":
            event.listen(self.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))

    def _commit(self, connection: Any) -> None:
        armed, self._armed = self._armed, None
        if armed == LOST_BEFORE:
            raise self._lost("server closed the connection unexpectedly")
        if armed == AGAIN:
            raise self._asks_again(*self._words)
        self._really_commit(connection)
        if armed == LOST_AFTER:
            raise self._lost("server closed the connection unexpectedly")

    def _tell_lost_connections(self, context: Any) -> None:
        if isinstance(context.original_exception, self._lost):
            context.is_disconnect = True

    def _once(self, begin: Callable[[], Any], work: Callable[[Any], T], alone: bool) -> tuple[T, Actions]:
        flow = this_flow()
        if flow is None:
            return super()._once(begin, work, alone)
        order = None if flow.away_for else stop(COMMIT)
        if order == AWAY:
            flow.away_for = 5
        if flow.away_for:
            flow.away_for -= 1
            raise OperationalError("BEGIN", {}, self._lost("connection refused"), connection_invalidated=True)
        self._armed = order
        try:
            result = self._alone(begin, work) if alone else super()._once(begin, work, alone)
        finally:
            self._armed = None
        if order == AFTER_COMMIT:
            flow.process.alive = False
            raise Died
        return result

    def _alone(self, begin: Callable[[], Any], work: Callable[[Any], T]) -> tuple[T, Actions]:
        """A statement that is a transaction of its own has no COMMIT that could be lost: its answer is."""
        armed, self._armed = self._armed, None
        lost = CommitUnknown(OperationalError("…", {}, self._lost("closed"), connection_invalidated=True))
        if armed == AGAIN:
            raise OperationalError("…", {}, self._asks_again(*self._words))
        if armed == LOST_BEFORE:
            raise lost
        result = super()._once(begin, work, alone=True)
        if armed == LOST_AFTER:
            raise lost
        return result

    def read(self) -> Any:
        """Open a session as usual; raise `Died` in a process that has ended."""
        flow = this_flow()
        if flow is not None and not flow.process.alive:
            raise Died
        return super().read()

    def wipe(self) -> None:
        """Delete all rows."""
        with self.transaction() as session:
            for table in reversed(Base.metadata.sorted_tables):
                session.execute(table.delete())
