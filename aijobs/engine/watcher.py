"""One watcher a process: renews leases, sees cancel requests, and ends attempts that are out of time.

Renewal stops at the attempt's deadline: a lease shows that the attempt moves, not only that its process lives.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from sqlalchemy import select

from aijobs.db.database import Database
from aijobs.engine.active_runs import ActiveRuns
from aijobs.engine.ending import Ending
from aijobs.engine.failure import ErrorLog
from aijobs.engine.outcome import Cancelled, Lost, TimedOut
from aijobs.engine.run import Run
from aijobs.engine.token import CANCELLED, TIMEOUT
from aijobs.jobs.errors import LifecycleError
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import JobState
from aijobs.logs import Outage, get_logger

logger = get_logger(__name__)


class CancelHints(Protocol):
    """The broker's hints: faster than the database, and never trusted alone."""

    def find_cancel_hints(self, job_ids: Iterable[str]) -> set[str]:
        """Return the jobs that have a hint; none if the broker doesn't answer. Doesn't raise."""
        ...


class _Holder(NamedTuple):
    token: str | None
    asked_to_cancel: bool
    succeeded_as: int | None
    """The number of the attempt that succeeded, if one did."""


class Watcher:
    """Looks after the active runs of one process, in a thread of its own."""

    def __init__(
        self,
        database: Database,
        lifecycle: LifecycleRepository,
        hints: CancelHints,
        active: ActiveRuns,
        ending: Ending,
        *,
        abandon: Callable[[], None],
        heartbeat_s: float,
        watch_s: float,
        stuck_s: float,
    ) -> None:
        """`abandon` makes the process exit within a bounded time, and returns at once. It is called if the code of an
        attempt runs on for `stuck_s` after its end, because Python can't stop a running thread; or after its deadline,
        if a hanging projector keeps the end from being written.
        """
        self._database, self._lifecycle, self._hints = database, lifecycle, hints
        self._active, self._ending, self._abandon = active, ending, abandon
        self._heartbeat_s, self._watch_s, self._stuck_s = heartbeat_s, watch_s, stuck_s
        self._renewed: dict[str, float] = {}
        self._over_since: dict[str, float] = {}
        self._error_log = ErrorLog(logger, Outage(logger, "watcher.database"), "watcher.failed")
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
        check_at = 0.0
        while not self._closing.wait(self._watch_s / 5):
            try:
                if time.monotonic() < check_at and not self._hinted():
                    continue
                check_at = time.monotonic() + self._watch_s
                self.check()
                self._error_log.worked()
            except Exception as error:
                self._error_log.failed(error)

    def _hinted(self) -> bool:
        """Return whether the broker hints at a cancel of an active run."""
        ids = [run.lease.job_id for run in self._active.all() if not run.ended.is_set()]
        return bool(ids) and bool(self._hints.find_cancel_hints(ids))

    def check(self) -> None:
        """Check each active run once. An error with one run doesn't stop the renewal of other leases."""
        runs = self._active.all()
        self._forget_all_but(runs)
        live = [run for run in runs if not run.ended.is_set()]
        # Cancels first: they must not wait for the renewals of other runs.
        errors = [*self._compare_all(live), *(self._guarded(self._attend, run) for run in runs)]
        for error in filter(None, errors):
            raise error

    def _compare_all(self, live: Sequence[Run]) -> list[Exception | None]:
        try:
            holders = self._holders(live)
        except Exception as error:
            return [error]
        return [self._guarded(self._compare, run, holders.get(run.lease.job_id)) for run in live]

    @staticmethod
    def _guarded(action: Callable[..., None], run: Run, *args: Any) -> Exception | None:
        try:
            action(run, *args)
        except Exception as error:
            return error
        return None

    def _attend(self, run: Run) -> None:
        """End a run that is out of time, report one whose code doesn't return, renew the lease of any other."""
        if run.ended.is_set() or (run.projecting and run.token.reason == TIMEOUT):
            self._report_stuck(run)
        elif run.token.reason == TIMEOUT:
            self.stop(run, TIMEOUT)
        else:
            self._renew(run)

    def _forget_all_but(self, runs: list[Run]) -> None:
        tokens = {run.lease.token for run in runs}
        for times in (self._renewed, self._over_since):
            for token in times.keys() - tokens:
                del times[token]

    def stop(self, run: Run, reason: str) -> None:
        """End a run that is cancelled or out of time, whether or not its code has returned.

        Tries once and doesn't wait, because other runs need the watcher too. The next check tries again.
        """
        run.token.cancel(reason)
        self._ending.end(run, Cancelled() if reason == CANCELLED else TimedOut(), wait=0, tries=1)

    def _report_stuck(self, run: Run) -> None:
        now = time.monotonic()
        if now - self._over_since.setdefault(run.lease.token, now) > self._stuck_s:
            self._over_since[run.lease.token] = math.inf  # Once: the process is about to exit.
            self._leave(run)

    def _leave(self, run: Run) -> None:
        """Exit, and release all other leases at once.

        Abandon first: if releasing blocks, because the stuck code holds the write lock, the process still exits.
        """
        logger.error("engine.stuck", **run.fields())
        self._abandon()
        self._active.drain(0)

    def _holders(self, live: Sequence[Run]) -> Mapping[str, _Holder]:
        """Return who holds the live runs' jobs, and which are asked to be cancelled, in one statement."""
        if not live:
            return {}
        ids = {run.lease.job_id for run in live}
        with self._database.read() as session:
            rows = session.execute(
                select(
                    AiJob.id, AiJob.locked_by, AiJob.cancel_requested_at, AiJob.lifecycle_status, AiJob.attempt_no
                ).where(AiJob.id.in_(ids))
            )
            return {
                job_id: _Holder(token, asked_at is not None, attempt_no if status == JobState.SUCCEEDED else None)
                for job_id, token, asked_at, status, attempt_no in rows
            }

    def _compare(self, run: Run, holder: _Holder | None) -> None:
        if run.ended.is_set() or (holder is not None and holder.succeeded_as == run.lease.attempt_no):
            return  # Its own success is committed, and its code is about to end it.
        if holder is None or holder.token != run.lease.token:
            self._ending.end(run, Lost(), wait=0)  # If another thread is ending it, the next check sees it ended.
        elif holder.asked_to_cancel:
            self.stop(run, CANCELLED)

    def _renew(self, run: Run) -> None:
        token, now = run.lease.token, time.monotonic()
        if now - self._renewed.setdefault(token, now) < self._heartbeat_s:
            return
        if not run.end_lock.acquire(blocking=False):
            return  # It is being ended. The transaction holds the row, so the reaper can't take the lease either.
        try:
            # If it fails, the next check tries again. A child that projects holds the row for long: don't wait for it.
            self._lifecycle.extend_lock(run.lease, tries=1, waits=run.child is None)
        except LifecycleError:
            return  # Lost or just ended: the next check compares holders and finds out.
        finally:
            run.end_lock.release()
        self._renewed[token] = now
