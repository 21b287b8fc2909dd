"""The place of suspects: jobs that lost a worker run one at a time, each alone in a kept child of this process.

So a job that ends its process takes no other with it, and its death is known to be its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from aijobs.db.database import TRIES
from aijobs.engine.attempt import Attempts
from aijobs.engine.child import Answer, Child, ChildUnused
from aijobs.engine.complete import complete
from aijobs.engine.failure import DatabaseTrouble
from aijobs.engine.run import Run
from aijobs.engine.token import CANCELLED, RELEASED, TIMEOUT
from aijobs.errors import LifecycleError
from aijobs.events import DomainEvent, EventBus
from aijobs.jobs.ends import announce_end
from aijobs.jobs.lifecycle import WORKER_LOST, LifecycleRepository
from aijobs.jobs.status import FINAL
from aijobs.logs import Outage, get_logger
from aijobs.queues.message import JobMessage

logger = get_logger(__name__)

MOST_WAITING = 1000
"""Messages that are kept in memory; the re-drive finds those that aren't."""
START_LIMIT_S = 60.0
"""How long a child may take until it is ready."""
START_PAUSE_S = 10.0
"""Between two starts after one that failed."""
AGAIN_S = 1.0
"""Between two tries to write an end while the database is away."""
ORPHAN_S = 30
"""How long after an attempt's deadline its child ends by itself, if nobody has killed it."""


class Suspects:
    """Runs the suspects of one process. Its methods may be called from any thread."""

    def __init__(self, lifecycle: LifecycleRepository, attempts: Attempts, bus: EventBus) -> None:
        self._lifecycle, self._attempts, self._bus = lifecycle, attempts, bus
        self._waiting: OrderedDict[str, tuple[JobMessage, bool]] = OrderedDict()
        self._place = threading.Lock()
        self._child: Child | None = None
        self._started_at, self._start_after = 0.0, 0.0
        self._trouble = DatabaseTrouble(logger, Outage(logger, "suspects.database"), "suspects.failed")

    # --- whose turn it is ----------------------------------------------------------------------------------------

    def waits(self, job_id: str) -> bool:
        """Whether the job's message waits here already."""
        return job_id in self._waiting

    def add(self, message: JobMessage, *, fresh: bool) -> None:
        """Queue the message in memory. If it is lost, the re-drive sends it again.

        `fresh` asks for a child that has run no job: the suspect's last one may have died of what another job left.
        """
        if len(self._waiting) < MOST_WAITING:
            self._waiting[message.job_id] = message, fresh

    @contextmanager
    def turn(self) -> Iterator[JobMessage | None]:
        """Hold the place and give the message that waited longest.

        Yield None if another slot runs a suspect, none waits, or the child is still starting. Never blocks.
        """
        if not self._place.acquire(blocking=False):
            yield None
            return
        try:
            yield self._pop()
        finally:
            self._place.release()

    def _pop(self) -> JobMessage | None:
        waiting = list(self._waiting.values())  # At once, as other threads add.
        if not waiting or not self._find_ready(fresh=waiting[0][1]):
            return None
        return self._waiting.popitem(last=False)[1][0]

    def _find_ready(self, *, fresh: bool) -> bool:
        """Whether a child is ready, a `fresh` one if need be; start one if there is none."""
        child, now = self._child, time.monotonic()
        if child is not None and fresh and not child.is_fresh:
            child.kill()
        if child is None:
            if now >= self._start_after:
                self._start(now)
            return False
        if not child.is_gone:
            if child.is_ready:
                return True
            if now - self._started_at < START_LIMIT_S:
                return False
        child.kill()
        if child.is_ready:
            self._start(now)
        else:
            self._start_failed("it was not ready in time, or ended before")
        return False

    def _start(self, now: float) -> None:
        try:
            self._child, self._started_at = Child(), now
        except OSError as error:
            self._start_failed(str(error))
        else:
            logger.info("suspects.child_started", pid=self._child.pid)

    def _start_failed(self, why: str) -> None:
        self._child, self._start_after = None, time.monotonic() + START_PAUSE_S
        logger.error("suspects.child_failed", error=why)

    def close(self) -> None:
        """Kill the child."""
        if self._child is not None:
            self._child.kill()

    # --- one attempt -----------------------------------------------------------------------------------------------

    def run(self, run: Run, give_back: Callable[[Run], None]) -> None:
        """Have the child run a locked job, and see to the attempt's end; `give_back` releases its lease.

        Doesn't raise, and leaves `run` ended.
        """
        fresh = self._child is not None and self._child.is_fresh
        try:
            answer = self._ask(run)
            if answer is not None:
                self._end_as_told(run, answer)
            else:
                self._end_for_child(run, give_back, fresh)
        except Exception as error:  # The lease runs out, and the reaper takes the job.
            self._trouble.failed(error)
        finally:
            run.returned.set()
            run.end("lost")

    def _ask(self, run: Run) -> Answer | None:
        claim = run.claim
        seconds = run.token.remaining()
        order = {
            "claim": [claim.job_id, claim.token, claim.attempt_no],
            "event": run.outbox_id,
            "seconds": seconds,
            "alarm": math.ceil(seconds) + ORPHAN_S,
        }
        try:
            if self._child is None:
                raise ChildUnused
            return self._child.run(claim.token, order, run.token.on_cancel)
        except ChildUnused:
            run.token.cancel(RELEASED)
            return None

    def _end_as_told(self, run: Run, answer: Answer) -> None:
        """The child wrote the end: who listens in this process hears of it."""
        for event in answer["events"]:
            self._bus.publish(DomainEvent(*event))
        with run.ending:
            run.end(answer["outcome"])
        if run.outcome == "lost":
            self._tell_end(run)

    def _end_for_child(self, run: Run, give_back: Callable[[Run], None], fresh: bool) -> None:
        """Write the end of an attempt whose child is gone; while the database is away, again and again."""
        while not run.ended.is_set():
            try:
                with run.ending:
                    if not run.ended.is_set():
                        self._write_end(run, give_back, fresh)
            except Exception as error:
                self._trouble.failed(error)
                run.ended.wait(AGAIN_S)
            else:
                self._trouble.worked()
        if run.outcome == "lost":
            self._tell_end(run)

    def _write_end(self, run: Run, give_back: Callable[[Run], None], fresh: bool) -> None:
        reason = run.token.reason
        with suppress(LifecycleError):  # The child wrote the end just before, or another worker has the job.
            if reason is None:
                self._lose(run, fresh)
            elif reason == RELEASED:
                give_back(run)
            elif reason in (CANCELLED, TIMEOUT):
                self._attempts.end(run, reason, TRIES)
        run.end("lost")

    def _lose(self, run: Run, fresh: bool) -> None:
        """The child died of itself. Charge the job if the child was `fresh`: an earlier job may have left a thread."""
        job = self._lifecycle.charge(run.claim) if fresh else self._lifecycle.lose_uncharged(run.claim)
        losses = {"lostCount": job.lost_count, "unchargedLosses": job.uncharged_losses}
        fields = run.fields(job, WORKER_LOST if fresh else None)
        logger.warning("job.lease_lost", holder=run.claim.instance, **losses, **fields)
        if job.lifecycle_status in FINAL:
            complete(run, job, job.error_code)

    def _tell_end(self, run: Run) -> None:
        """Tell of an end that the child wrote, and was killed or died before it could say so."""
        try:
            job = self._lifecycle.find(run.claim.job_id)
        except Exception as error:
            self._trouble.failed(error)
            return
        if job is not None and job.lifecycle_status in FINAL and job.attempt_no == run.claim.attempt_no:
            announce_end(self._bus, job, event_id=run.outbox_id)
