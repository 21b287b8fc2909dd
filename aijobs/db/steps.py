"""Run long work in small transactions, with a rest after each on SQLite, which has one writer."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

from sqlalchemy.orm import Session

from aijobs.db.database import Database, T

LEAST_REST_S = 0.005
"""Minimum rest. A writer that waits for SQLite's lock polls after 1, 2, 5 and 10 ms, and then more rarely."""


class Steps:
    """Runs the transactions of a pass, a deletion or a rotation one after the other.

    SQLite has one writer and no queue: a waiting writer polls for the lock, and a loop that releases it for
    microseconds starves it. So each step rests for `rest` times as long as it held the lock. On a server transactions
    lock rows, and no step rests.
    """

    def __init__(self, database: Database, *, rest: float = 6.0, progress: Callable[[], None] = lambda: None) -> None:
        """`progress` is called after each committed step, so that a long pass isn't taken for one that hangs."""
        self._database, self._rest, self._progress = database, rest, progress
        self._has_one_writer = database.engine.dialect.name == "sqlite"

    def write(self, work: Callable[[Session], T], confirm: Callable[[Session], T | None] | None = None) -> T:
        """Run one step, as `Database.write` does, and rest."""
        began: float | None = None

        def timed(session: Session) -> T:
            nonlocal began
            session.connection()  # The transaction begins here. Waiting for the lock delays no other writer.
            began = monotonic()
            return work(session)

        try:
            result = self._database.write(timed, confirm)
        finally:
            if self._has_one_writer:
                held_s = 0.0 if began is None else monotonic() - began
                sleep(max(LEAST_REST_S, self._rest * held_s))
        self._progress()
        return result
