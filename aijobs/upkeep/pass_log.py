"""The result of each pass's last run, for the console. Without it, a pass that doesn't run looks like an idle one.

A run succeeded if it returned, even if it skipped rows: those have a line in the log and are tried in the next run.
A long run records its progress as success.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.db.statements import change_rows, insert_if_absent
from aijobs.jobs.models import NOTE_S, PassRun
from aijobs.logs import Outage, fault, get_logger

_PROBE = "write_probe"
"""The row that processes write to check that the database accepts writes."""

logger = get_logger(__name__)

T = TypeVar("T")


def probe_writes(clock: Clock) -> Callable[[Session], None]:
    """Return a unit of work that writes one small row, which belongs to no pass."""
    note = update(PassRun).where(PassRun.name == _PROBE).values(succeeded_at=clock.now())

    def write(session: Session) -> None:
        if not change_rows(session, note):
            insert_if_absent(session, PassRun, "name", name=_PROBE, period_ms=0, failures=0)

    return write


class PassLog:
    """Records the results of passes: one row for each pass, which all processes share."""

    def __init__(self, database: Database, clock: Clock, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database, self._clock, self._monotonic = database, clock, monotonic
        self._guard = Lock()
        self._failures: dict[str, int] = {}
        self._noted_at: dict[str, float] = {}
        self._outage = Outage(logger, "pass_log.database")

    def run(self, name: str, every_s: float, action: Callable[[], T]) -> T:
        """Run `action` and record success or failure. Return its result, or raise its error."""
        try:
            result = action()
        except Exception as error:
            self._note(name, every_s, " ".join(fault(error).values()))
            raise
        self._note(name, every_s, None)
        return result

    def progress(self, name: str, every_s: float) -> Callable[[], None]:
        """Return a function for a run to call after each step. The count of failures stays until a run succeeds."""
        return partial(self._record_progress, name, every_s)

    def _record_progress(self, name: str, every_s: float) -> None:
        with self._guard:
            now, last = self._monotonic(), self._noted_at.get(name)
            if last is not None and now - last < NOTE_S:
                return
            self._noted_at[name] = now
        self._try_to_write(name, every_s, succeeded_at=self._clock.now())

    def _note(self, name: str, every_s: float, error: str | None) -> None:
        """Write the result if it differs from the last one, or the row is old. Never raises a database error."""
        with self._guard:
            before = self._failures.get(name, 0)
            failures = self._failures[name] = before + 1 if error is not None else 0
            is_news = bool(before) != bool(failures)
            now, last = self._monotonic(), self._noted_at.get(name)
            if not is_news and last is not None and now - last < NOTE_S:
                return
            self._noted_at[name] = now
        how: dict[str, Any] = {"succeeded_at": self._clock.now()}
        if error is not None:
            how = {"failed_at": self._clock.now(), "error": error}
        self._try_to_write(name, every_s, failures=failures, **how)

    def _try_to_write(self, name: str, every_s: float, **values: Any) -> None:
        try:
            self._write(name, round(every_s * 1000), values)
        except SQLAlchemyError as error:
            with self._guard:
                self._noted_at.pop(name, None)  # The next run writes it.
            self._outage.failed(error)
        else:
            self._outage.worked()

    def _write(self, name: str, period_ms: int, values: dict[str, Any]) -> None:
        note = update(PassRun).where(PassRun.name == name).values(period_ms=period_ms, **values)

        def write(session: Session) -> None:
            if not change_rows(session, note):
                insert_if_absent(session, PassRun, "name", name=name, period_ms=period_ms, failures=0)
                change_rows(session, note)

        self._database.write(write, tries=1)
