"""Stage 5, COMPLETE: the only door through which an attempt ends."""

from __future__ import annotations

from aijobs.db.database import TRIES
from aijobs.engine.end_writes import EndWrites
from aijobs.engine.outcome import (
    Cancelled,
    Died,
    End,
    Failed,
    Lost,
    Outcome,
    Postponed,
    Released,
    Succeeded,
    TimedOut,
)
from aijobs.engine.run import Run
from aijobs.engine.token import CANCELLED, LOST, RELEASED, TIMEOUT
from aijobs.errors import JobError
from aijobs.jobs.errors import CancelRequested, IllegalTransition, LifecycleError
from aijobs.jobs.lease import KnownJob
from aijobs.jobs.lifecycle.release import WORKER_LOST
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.status import FINAL
from aijobs.logs import fault, get_logger

logger = get_logger(__name__)

NO_LIMIT = -1.0


class Ending:
    """Ends attempts, for their own code, the watcher, a drain, and the parent of a child process."""

    def __init__(self, lifecycle: LifecycleRepository, writes: EndWrites) -> None:
        self._lifecycle, self._writes = lifecycle, writes

    def end(self, run: Run, end: End, *, wait: float = NO_LIMIT, tries: int = TRIES) -> Outcome | None:
        """End the attempt, write down what becomes of its job, and return the outcome; None if it is still open.

        The write decides what becomes of the job, not `end`: a requested cancel wins, and a failure may be retried.
        It takes effect once. A second call only closes the usage row of the attempt's last provider call.
        `wait`: seconds to wait while another thread is ending the attempt. `tries`: of the write. An error of the
        database is raised, and leaves the attempt open: call again.
        """
        if not run.end_lock.acquire(timeout=wait):
            return None
        try:
            if run.ended.is_set():
                self._close_call(run, end.code)
            else:
                self._end(run, end, tries)
        finally:
            run.end_lock.release()
        return run.outcome

    def leave_to_reaper(self, run: Run, code: str | None, why: Exception) -> None:
        """End an attempt whose end can't be written: its lease runs out, and the reaper takes the job."""
        logger.error("job.left_to_reaper", error=type(why).__name__, **run.fields(error_code=code))
        with run.end_lock:
            run.end(Outcome.LOST)

    def _end(self, run: Run, end: End, tries: int) -> None:
        if isinstance(end, Succeeded):
            self._complete(run, end.job)
        elif isinstance(end, Lost):
            self._lose(run, end.why)
        elif not isinstance(end, Released) and run.token.reason in (LOST, RELEASED):
            self._close_call(run, end.code)
            run.end(Outcome.LOST)
        else:
            try:
                self._write(run, end, tries)
            except CancelRequested:
                self._end(run, Cancelled(), tries)
            except LifecycleError as gone:
                self._lose(run, gone)

    def _write(self, run: Run, end: End, tries: int) -> None:
        match end:
            case Failed(error, cause):
                self._complete(run, self._writes.fail(run, error, cause, tries=tries), error.code)
            case TimedOut():
                error = JobError(TIMEOUT, f"the attempt passed {run.definition.execution.timeout_ms} ms")
                self._complete(run, self._writes.fail(run, error, error, tries=tries), TIMEOUT)
            case Cancelled():
                run.token.cancel(CANCELLED)
                self._complete(run, self._writes.cancel(run, tries=tries), CANCELLED)
            case Postponed(busy):
                job = self._writes.postpone(run, busy)
                if job.lifecycle_status in FINAL or job.retry_count > run.job.retry_count:
                    self._complete(run, job, job.error_code or end.code)
                else:
                    logger.info("job.postponed", waitMs=round(busy.wait.total_seconds() * 1000), **run.fields(job))
                    run.end(Outcome.POSTPONED)
            case Released():
                # Stop the code first: it must not end the attempt before its lease is released.
                run.token.cancel(RELEASED)
                job = self._lifecycle.release(run.lease)
                if job.lifecycle_status not in FINAL:
                    logger.info("job.released", **run.fields(job))
                self._complete(run, job, open_as=Outcome.RELEASED)
            case Died(charged):
                job = self._lifecycle.charge(run.lease) if charged else self._lifecycle.lose_uncharged(run.lease)
                losses = {"lostCount": job.lost_count, "unchargedLosses": job.uncharged_losses}
                fields = run.fields(job, WORKER_LOST if charged else None)
                logger.warning("job.lease_lost", holder=run.lease.instance, **losses, **fields)
                self._complete(run, job, open_as=Outcome.LOST)

    def _complete(
        self, run: Run, job: KnownJob, code: str | None = None, *, open_as: Outcome = Outcome.RETRY_SCHEDULED
    ) -> None:
        """End the attempt as `job` says, or `open_as` if the job goes on. The job's end was announced at its commit."""
        if code == TIMEOUT:
            logger.warning("job.timed_out", limitMs=run.definition.execution.timeout_ms, **run.fields(job, code))
        if job.lifecycle_status in FINAL:
            run.end(Outcome(job.lifecycle_status))
            return
        if open_as is Outcome.RETRY_SCHEDULED:
            logger.info("job.retry_scheduled", outputHash=job.output_hash, **run.fields(job, code))
        run.end(open_as)

    def _lose(self, run: Run, why: LifecycleError | None) -> None:
        """The row refused a write: another attempt has the job."""
        if run.child is not None and isinstance(why, IllegalTransition):
            return  # The child has just committed its end, and is about to say so.
        if why is None:  # The watcher saw it. The attempt's own code closes the usage row when it returns.
            logger.warning("job.lock_lost", **run.fields())
        else:
            logger.warning("job.lock_lost", why=type(why).__name__, **run.fields())
            self._close_call(run, run.token.reason or LOST)
        run.token.cancel(LOST)
        run.end(Outcome.LOST)

    def _close_call(self, run: Run, code: str | None) -> None:
        """Close the usage row of the last call: the money is spent, whichever attempt holds the job."""
        if run.call is None or code is None:
            return
        try:
            self._writes.close_call(run, code)
        except Exception as error:
            logger.error("usage.close_failed", **fault(error), **run.fields(error_code=code))
