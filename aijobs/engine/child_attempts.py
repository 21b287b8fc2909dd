"""The parent's side of an attempt in a child process: hand it over, and end it if the child could not."""

from __future__ import annotations

import math

from aijobs.engine.child import Answer, Child, ChildUnused
from aijobs.engine.ending import Ending
from aijobs.engine.failure import ErrorLog
from aijobs.engine.outcome import Cancelled, Died, End, Outcome, Released, TimedOut
from aijobs.engine.run import Run
from aijobs.engine.token import CANCELLED, RELEASED, TIMEOUT
from aijobs.events import DomainEvent, EventBus
from aijobs.jobs.ends import announce_end
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.status import FINAL
from aijobs.logs import Outage, get_logger

logger = get_logger(__name__)

AGAIN_S = 1.0
"""The wait between two tries to write an end while the database is away."""
DEPRIORITISED_S = 20.0
"""How long other users come first after a job of this user killed a child. Shorter than the alarm, so that the user's
next job runs in a child too.
"""
ORPHAN_S = 30
"""How long after an attempt's deadline its child ends by itself, if its parent hasn't killed it."""


class ChildAttempts:
    """Runs locked jobs in children, each in the thread that asks for it."""

    def __init__(self, lifecycle: LifecycleRepository, ending: Ending, bus: EventBus) -> None:
        self._lifecycle, self._ending, self._bus = lifecycle, ending, bus
        self._error_log = ErrorLog(logger, Outage(logger, "suspects.database"), "suspects.failed")

    def run(self, run: Run, child: Child) -> bool:
        """Have the child run the attempt, and end it. Return whether the child died of itself. Never raises."""
        died = False
        try:
            died = self._run(run, child)
        except Exception as error:  # The lease runs out, and the reaper takes the job.
            self._error_log.failed(error)
        return died

    def _run(self, run: Run, child: Child) -> bool:
        fresh, answer = child.is_fresh, self._ask(run, child)
        if answer is not None:
            for event in answer["events"]:
                self._bus.publish(DomainEvent(*event))
            with run.end_lock:
                run.end(Outcome(answer["outcome"]))
            died = False
        else:
            died = run.token.reason is None
            if died:  # The user's other jobs may be like it.
                self._lifecycle.deprioritise(run.job.user_id, DEPRIORITISED_S)
            self._end_until_written(run, fresh)
        if run.outcome is Outcome.LOST:
            self._announce(run)
        return died

    def _ask(self, run: Run, child: Child) -> Answer | None:
        lease, seconds = run.lease, run.token.remaining()
        order = {
            "lease": [lease.job_id, lease.token, lease.attempt_no],
            "event": run.outbox_id,
            "seconds": seconds,
            "alarm": math.ceil(seconds) + ORPHAN_S,
        }
        try:
            return child.run(lease.token, order, run.token.on_cancel)
        except ChildUnused:
            run.token.cancel(RELEASED)
            return None

    def _end_until_written(self, run: Run, fresh: bool) -> None:
        """End an attempt whose child is gone. While the database is away, try again and again."""
        end = _end_of(run.token.reason, fresh)
        while end is not None and not run.ended.is_set():
            try:
                self._ending.end(run, end)
            except Exception as error:
                self._error_log.failed(error)
                run.ended.wait(AGAIN_S)
            else:
                self._error_log.worked()
                break
        with run.end_lock:
            run.end(Outcome.LOST)  # If it is still open, the child committed an end that this process doesn't know.

    def _announce(self, run: Run) -> None:
        """Announce an end that the child committed, if it died before it could say so."""
        try:
            job = self._lifecycle.find(run.lease.job_id)
        except Exception as error:
            self._error_log.failed(error)
            return
        if job is not None and job.lifecycle_status in FINAL and job.attempt_no == run.lease.attempt_no:
            announce_end(self._bus, job, event_id=run.outbox_id)


def _end_of(reason: str | None, fresh: bool) -> End | None:
    """Return the end of an attempt whose child is gone, killed for `reason` or dead of itself.

    It is charged if the child was `fresh`: otherwise an earlier job may have left a thread that killed it. None if the
    lease is lost.
    """
    ends: dict[str | None, End] = {None: Died(fresh), RELEASED: Released(), CANCELLED: Cancelled(), TIMEOUT: TimedOut()}
    return ends.get(reason)
