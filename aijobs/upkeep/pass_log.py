"""How each pass last went, for whoever watches: a duty that isn't done looks like one that has nothing to do.

A round went well if it came to its end. A row that it could do nothing about has a line in the log, and its next round.
A round that takes long notes its progress: it goes well so far.
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
"""The row that processes write to find out whether they can."""

logger = get_logger(__name__)

T = TypeVar("T")


def probe_writes(clock: Clock) -> Callable[[Session], None]:
    """A unit of work that writes one small row, which is no pass's."""
    note = update(PassRun).where(PassRun.name == _PROBE).values(succeeded_at=clock.now())

    def write(session: Session) -> None:
        if not change_rows(session, note):
            insert_if_absent(session, PassRun, "name", name=_PROBE, period_ms=0, failures=0)

    return write


class PassLog:
    """One process's notes, in one row a pass. All processes write to the same: a duty is done by whoever does it."""

    def __init__(self, database: Database, clock: Clock, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database, self._clock, self._monotonic = database, clock, monotonic
        self._guard = Lock()
        self._failures: dict[str, int] = {}
        self._noted_at: dict[str, float] = {}
        self._outage = Outage(logger, "pass_log.database")

    def run(self, name: str, every_s: float, action: Callable[[], T]) -> T:
        """What `action` answers, once it is noted how it went; what it raises goes on to the caller."""
        try:
            result = action()
        except Exception as error:
            self._note(name, every_s, " ".join(fault(error).values()))
            raise
        self._note(name, every_s, None)
        return result

    def progress(self, name: str, every_s: float) -> Callable[[], None]:
        """Return what a round calls after each of its steps. Failures that were noted stand until a round ends well."""
        return partial(self._go_on, name, every_s)

    def _go_on(self, name: str, every_s: float) -> None:
        with self._guard:
            now, last = self._monotonic(), self._noted_at.get(name)
            if last is not None and now - last < NOTE_S:
                return
            self._noted_at[name] = now
        self._try_to_write(name, every_s, succeeded_at=self._clock.now())

    def _note(self, name: str, every_s: float, error: str | None) -> None:
        """Write it down where it is news, or the last note is old; a note that can't be written harms no pass."""
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
        except SQLAlchemyError as trouble:
            with self._guard:
                self._noted_at.pop(name, None)  # The next round writes it.
            self._outage.failed(trouble)
        else:
            self._outage.worked()

    def _write(self, name: str, period_ms: int, values: dict[str, Any]) -> None:
        note = update(PassRun).where(PassRun.name == name).values(period_ms=period_ms, **values)

        def write(session: Session) -> None:
            if not change_rows(session, note):
                insert_if_absent(session, PassRun, "name", name=name, period_ms=period_ms, failures=0)
                change_rows(session, note)

        self._database.write(write, tries=1)
