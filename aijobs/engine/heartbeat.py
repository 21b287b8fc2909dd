"""One watcher a process: renews leases, sees cancel requests, and ends attempts that are out of time.

A beat proves that the attempt moves, not only that the process lives: it stops at the attempt's deadline.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from sqlalchemy import select

from aijobs.db.database import Database
from aijobs.engine.failure import DatabaseTrouble
from aijobs.engine.run import Run
from aijobs.engine.token import CANCELLED, LOST, TIMEOUT
from aijobs.errors import LifecycleError
from aijobs.jobs.lifecycle import LifecycleRepository
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import SUCCEEDED
from aijobs.logs import Outage, get_logger

logger = get_logger(__name__)


class CancelHints(Protocol):
    """The broker's hints, faster than the database and never trusted alone."""

    def find_cancel_hints(self, job_ids: Iterable[str]) -> set[str]:
        """Those of the jobs for which a hint is there; none where the broker doesn't answer. Doesn't raise."""
        ...


class _Holder(NamedTuple):
    token: str | None
    asked_to_cancel: bool
    succeeded_as: int | None
    """The attempt that succeeded, where one did."""


class Watcher:
    """Looks after the active runs of one process, in a thread of its own."""

    def __init__(
        self,
        database: Database,
        lifecycle: LifecycleRepository,
        hints: CancelHints,
        *,
        active: Callable[[], list[Run]],
        stop: Callable[[Run, str], None],
        stuck: Callable[[Run], None],
        heartbeat_s: float,
        watch_s: float,
        stuck_s: float,
    ) -> None:
        """`active` lists the runs whose code has not returned; `stop(run, reason)` ends one under its claim;
        `stuck(run)` is told of a run whose code runs on `stuck_s` after its end, or after its deadline where a hanging
        projector keeps the end from being written.
        """
        self._database, self._lifecycle, self._hints = database, lifecycle, hints
        self._active, self._stop, self._stuck = active, stop, stuck
        self._heartbeat_s, self._watch_s, self._stuck_s = heartbeat_s, watch_s, stuck_s
        self._beaten: dict[str, float] = {}
        self._over_since: dict[str, float] = {}
        self._trouble = DatabaseTrouble(logger, Outage(logger, "watcher.database"), "watcher.failed")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watcher", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _loop(self) -> None:
        look_at = 0.0
        while not self._closing.wait(self._watch_s / 5):
            try:
                if time.monotonic() < look_at and not self._hinted():
                    continue
                look_at = time.monotonic() + self._watch_s
                self.look()
                self._trouble.worked()
            except Exception as error:
                self._trouble.failed(error)

    def _hinted(self) -> bool:
        """Whether the broker hints at a cancel of an active run: a reason to look into the database now."""
        ids = [run.claim.job_id for run in self._active() if not run.ended.is_set()]
        return bool(ids) and bool(self._hints.find_cancel_hints(ids))

    def look(self) -> None:
        """One round over the active runs. What goes wrong with one run keeps no other from its beat."""
        runs = self._active()
        self._forget_all_but(runs)
        live = [run for run in runs if not run.ended.is_set()]
        # Cancels first, which wait for no other run's beat.
        troubles = [*self._compare_all(live), *(self._guarded(self._attend, run) for run in runs)]
        for trouble in filter(None, troubles):
            raise trouble

    def _compare_all(self, live: Sequence[Run]) -> list[Exception | None]:
        try:
            holders = self._holders(live)
        except Exception as error:
            return [error]
        return [self._guarded(self._compare, run, holders.get(run.claim.job_id)) for run in live]

    @staticmethod
    def _guarded(action: Callable[..., None], run: Run, *args: Any) -> Exception | None:
        try:
            action(run, *args)
        except Exception as error:
            return error
        return None

    def _attend(self, run: Run) -> None:
        """End a run that is out of time, report one whose code doesn't return, beat for any other."""
        if run.ended.is_set() or (run.projecting and run.token.reason == TIMEOUT):
            self._report_stuck(run)
        elif run.token.reason == TIMEOUT:
            self._stop(run, TIMEOUT)
        else:
            self._beat(run)

    def _forget_all_but(self, runs: list[Run]) -> None:
        tokens = {run.claim.token for run in runs}
        for book in (self._beaten, self._over_since):
            for token in book.keys() - tokens:
                del book[token]

    def _report_stuck(self, run: Run) -> None:
        now = time.monotonic()
        if now - self._over_since.setdefault(run.claim.token, now) > self._stuck_s:
            self._over_since[run.claim.token] = math.inf  # Told once: the process is on its way out.
            self._stuck(run)

    def _holders(self, live: Sequence[Run]) -> Mapping[str, _Holder]:
        """Who holds the live runs' jobs, and which of them are asked to be cancelled: one statement."""
        if not live:
            return {}
        ids = {run.claim.job_id for run in live}
        with self._database.read() as session:
            rows = session.execute(
                select(
                    AiJob.id, AiJob.locked_by, AiJob.cancel_requested_at, AiJob.lifecycle_status, AiJob.attempt_no
                ).where(AiJob.id.in_(ids))
            )
            return {
                job_id: _Holder(token, asked_at is not None, attempt_no if status == SUCCEEDED else None)
                for job_id, token, asked_at, status, attempt_no in rows
            }

    def _compare(self, run: Run, holder: _Holder | None) -> None:
        if run.ended.is_set() or (holder is not None and holder.succeeded_as == run.claim.attempt_no):
            return  # Its own success is committed, and its code is about to say so.
        if holder is None or holder.token != run.claim.token:
            self._lose(run)
        elif holder.asked_to_cancel:
            self._stop(run, CANCELLED)

    def _beat(self, run: Run) -> None:
        token, now = run.claim.token, time.monotonic()
        if now - self._beaten.setdefault(token, now) < self._heartbeat_s:
            return
        if not run.ending.acquire(blocking=False):
            return  # It is just being ended. Its transaction holds the row, and so keeps off the reaper as well.
        try:
            # The next look beats again where this one fails. A suspect's child may hold its row for long.
            self._lifecycle.extend_lock(run.claim, tries=1, waits=not run.job.is_suspect)
        except LifecycleError:
            return  # Lost, or ended this very moment: the next look compares holders, and tells which.
        finally:
            run.ending.release()
        self._beaten[token] = now

    def _lose(self, run: Run) -> None:
        """Another attempt has the job: this one stops its call and writes nothing."""
        if not run.ending.acquire(blocking=False):
            return  # Somebody is just ending it, which frees the lock as well; the next look knows.
        try:
            if run.ended.is_set():
                return
            logger.warning("job.lock_lost", **run.fields())
            run.token.cancel(LOST)
            run.end("lost")
        finally:
            run.ending.release()
