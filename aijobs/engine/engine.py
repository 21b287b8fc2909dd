"""The one way a job is run: PREPARE, RESOLVE, EXECUTE, PROJECT, COMPLETE.

Free of Flask, Huey and Redis. Nothing is raised to whoever delivers messages: every outcome is a word, and every
change of the job is in the database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from aijobs.db.database import TRIES
from aijobs.db.engines import LOCK_WAIT_S
from aijobs.engine.complete import complete
from aijobs.engine.execute import Execute
from aijobs.engine.failure import DatabaseTrouble, as_job_error
from aijobs.engine.heartbeat import Watcher
from aijobs.engine.prepare import Prepare
from aijobs.engine.project import Project
from aijobs.engine.resolve import Resolve
from aijobs.engine.run import Run
from aijobs.engine.settle import Settle
from aijobs.engine.token import CANCELLED, LOST, RELEASED, TIMEOUT
from aijobs.errors import CancelRequested, JobError, LifecycleError, ProvidersBusy
from aijobs.jobs.lifecycle import LifecycleRepository
from aijobs.jobs.status import FINAL
from aijobs.logs import Outage, get_logger
from aijobs.queues.message import PUT_BACK, JobMessage

logger = get_logger(__name__)

NOT_TAKEN = "not_taken"
PROVIDER_UNAVAILABLE = "PROVIDER_UNAVAILABLE"


class Presence(Protocol):
    """Who shows the world what this worker is doing. Neither method raises."""

    def started(self, job_id: str) -> None: ...

    def finished(self, job_id: str) -> None: ...


class ExecutionEngine:
    """Runs jobs for one process. `start` before the first message, `drain` before the end."""

    def __init__(
        self,
        *,
        prepare: Prepare,
        resolve: Resolve,
        execute: Execute,
        project: Project,
        settle: Settle,
        lifecycle: LifecycleRepository,
        presence: Presence,
        watcher: Callable[[ExecutionEngine], Watcher],
        abandon: Callable[[], None],
    ) -> None:
        """`abandon` ends the process within a bounded time, because an attempt's code can't be brought to return; it
        doesn't wait for that.
        """
        self._prepare, self._resolve, self._execute = prepare, resolve, execute
        self._project, self._settle, self._lifecycle = project, settle, lifecycle
        self._presence, self._abandon = presence, abandon
        self._guard = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._draining = False
        self._trouble = DatabaseTrouble(logger, Outage(logger, "engine.database"), "engine.failed")
        self._watcher = watcher(self)

    def start(self) -> None:
        """Begin to renew leases and to look for cancel requests and deadlines."""
        self._watcher.start()

    def active(self) -> list[Run]:
        """The attempts whose code has not returned."""
        with self._guard:
            return list(self._runs.values())

    def execute(self, message: JobMessage) -> str:
        """Run the job of `message` and say how the attempt ended; `not_taken` where there was nothing to run,
        `PUT_BACK` where nobody can say: the database is away, or this process takes nothing any more.

        The attempt's code has a thread of its own, so that code which does not return when its time is up holds no
        slot of the worker.
        """
        if self._draining:
            return PUT_BACK
        try:
            run = self._prepare.take(message)
        except Exception as error:
            self._trouble.failed(error)
            # While the database is away the queue is left as it is. What one job alone can't be read for is dropped
            # instead, as it would hold up all others; the re-drive sends it again.
            return NOT_TAKEN if self._prepare.database_answers() else PUT_BACK
        self._trouble.worked()
        if run is None:
            return NOT_TAKEN
        with self._guard:
            self._runs[run.claim.token] = run
            too_late = self._draining
        if too_late:  # The drain began while the lock was taken, and may not have seen this run.
            self._release(run)
            self._forget(run)
            return run.outcome
        attempt = threading.Thread(target=self._attempt, args=(run,), name=f"attempt-{run.claim.job_id}", daemon=True)
        try:
            attempt.start()
        except RuntimeError as error:  # No thread is to be had: the job waits for a worker that has one.
            logger.error("engine.no_thread", error=str(error), **run.fields())
            self._release(run)
            self._forget(run)
            return PUT_BACK
        self._presence.started(run.claim.job_id)
        run.ended.wait()
        self._presence.finished(run.claim.job_id)
        return run.outcome

    # --- one attempt -------------------------------------------------------------------------------------------

    def _attempt(self, run: Run) -> None:
        try:
            self._walk(run)
        except LifecycleError as gone:
            self._yield(run, gone)
        except ProvidersBusy as busy:
            self._postpone(run, busy)
        except BaseException as error:
            self._fail(run, as_job_error(error), error)
        finally:
            run.returned.set()
            with run.ending:
                run.end("lost")
            self._forget(run)

    def _forget(self, run: Run) -> None:
        with self._guard:
            self._runs.pop(run.claim.token, None)

    def _walk(self, run: Run) -> None:
        resolved = self._resolve.resolve(run)
        if resolved is not None:
            self._execute.execute(run, resolved)
        run.token.raise_if_cancelled()
        with run.ending:
            job = self._project.project(run)
            complete(run, job)

    def _yield(self, run: Run, gone: LifecycleError) -> None:
        """The row refused a write of this attempt: it was cancelled, or another has it."""
        if isinstance(gone, CancelRequested):
            run.token.cancel(CANCELLED)
            try:
                with run.ending:
                    self._end(run, CANCELLED, TRIES)
            except Exception as error:
                self._leave_to_reaper(run, CANCELLED, error)
            return
        with run.ending:  # After whoever is just closing it, who may know less of the answer.
            if not run.ended.is_set():
                logger.warning("job.lock_lost", why=type(gone).__name__, **run.fields())
            self._close_call(run, run.token.reason or LOST)
            run.end("lost")  # Before the watcher's next look, which would tell of it again.

    def _fail(self, run: Run, error: JobError, cause: BaseException) -> None:
        with run.ending:
            if run.ended.is_set() or run.token.reason in (LOST, RELEASED):
                self._close_call(run, error.code)
                return
            try:
                job = self._settle.settle(run, error, cause)
            except LifecycleError as gone:
                self._yield(run, gone)
            except Exception as second:
                self._leave_to_reaper(run, error.code, second)
            else:
                complete(run, job, error.code)

    def _postpone(self, run: Run, busy: ProvidersBusy) -> None:
        """No provider is to be asked now: the job waits, and the worker's slot is free for another."""
        with run.ending:
            if run.ended.is_set() or run.token.reason in (LOST, RELEASED):
                return
            try:
                job = self._settle.postpone(run, busy)
            except LifecycleError as gone:
                self._yield(run, gone)
            except Exception as second:
                self._leave_to_reaper(run, PROVIDER_UNAVAILABLE, second)
            else:
                waits = job.lifecycle_status not in FINAL and job.retry_count == run.job.retry_count
                if waits:
                    logger.info("job.postponed", waitMs=round(busy.wait.total_seconds() * 1000), **run.fields(job))
                    run.end("postponed")
                else:
                    complete(run, job, job.error_code or PROVIDER_UNAVAILABLE)

    def _leave_to_reaper(self, run: Run, code: str, why: Exception) -> None:
        """Nothing could be written: the lease runs out, and the reaper ends the job or gives it its next attempt."""
        logger.error("job.left_to_reaper", error=type(why).__name__, **run.fields(error_code=code))

    def _close_call(self, run: Run, code: str) -> None:
        """Close the usage row of a call whose attempt is over: usage alone isn't fenced."""
        if run.call is None:
            return
        try:
            self._settle.close_call(run, code)
        except Exception as error:
            logger.error("usage.close_failed", error=type(error).__name__, **run.fields(error_code=code))

    # --- from outside the attempt's thread -----------------------------------------------------------------------

    def stop(self, run: Run, reason: str) -> None:
        """End a run under its claim, whether or not its code has returned: cancelled, or out of time.

        For the watcher, which looks after other runs too: it waits for nobody who is just ending this one, and tries
        once. Its next look, half a second later, tries again.
        """
        run.token.cancel(reason)
        if not run.ending.acquire(blocking=False):
            return
        try:
            self._end(run, reason, tries=1)
        finally:
            run.ending.release()

    def _end(self, run: Run, reason: str, tries: int) -> None:
        if run.ended.is_set():
            return
        try:
            if reason == CANCELLED:
                job = self._settle.cancel(run, tries=tries)
            else:
                error = JobError(TIMEOUT, f"the attempt passed {run.definition.execution.timeout_ms} ms")
                job = self._settle.settle(run, error, error, tries=tries)
        except LifecycleError:
            return  # Another worker has the job; the next look of the watcher says so.
        complete(run, job, reason)

    def stuck(self, run: Run) -> None:
        """An attempt's code runs on long after its end: leave the process, and give everything else back at once.

        In this order: what can't be given back, as the code holds the database's write lock, keeps no process alive.
        """
        logger.error("engine.stuck", **run.fields())
        self._abandon()
        self.drain(0)

    def drain(self, grace_s: float) -> int:
        """Take nothing new, let running attempts finish for `grace_s` seconds, give back the rest; how many."""
        with self._guard:
            self._draining = True
        ends = time.monotonic() + grace_s
        for run in self.active():
            run.ended.wait(max(0.0, ends - time.monotonic()))
        left = [run for run in self.active() if not run.ended.is_set()]
        for run in sorted(left, key=lambda run: run.projecting):  # Those last whose end may have to be waited for.
            self._release(run)
        return len(left)

    def close(self) -> None:
        """Stop the watcher, after `drain`."""
        self._watcher.close()

    def _release(self, run: Run) -> None:
        if not run.ending.acquire(timeout=LOCK_WAIT_S):
            # Where its projection ends in time that is a success; else its transaction ends with the process.
            logger.error("job.release_failed", error="its projection goes on", **run.fields())
            return
        try:
            self._give_back(run)
        finally:
            run.ending.release()

    def _give_back(self, run: Run) -> None:
        if run.ended.is_set():
            return
        # First: code that stops at once would else end the run before its lease is given back.
        run.token.cancel(RELEASED)
        try:
            job = self._lifecycle.release(run.claim)
        except LifecycleError:
            return  # Another worker has the job already.
        except Exception as error:
            logger.error("job.release_failed", error=type(error).__name__, **run.fields())
            return
        if job.lifecycle_status in FINAL:  # A cancel was requested meanwhile.
            complete(run, job)
            return
        logger.info("job.released", **run.fields(job))
        run.end("released")
