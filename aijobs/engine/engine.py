"""The one way a job is run: PREPARE, RESOLVE, EXECUTE, PROJECT, COMPLETE.

Free of Flask, Huey and Redis. Nothing is raised to whoever delivers messages: every outcome is a word, and every
change of the job is in the database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from aijobs.db.engines import LOCK_WAIT_S
from aijobs.engine.attempt import Attempts
from aijobs.engine.complete import complete
from aijobs.engine.failure import DatabaseTrouble
from aijobs.engine.heartbeat import Watcher
from aijobs.engine.prepare import Prepare
from aijobs.engine.run import Run
from aijobs.engine.suspects import Suspects
from aijobs.engine.token import RELEASED
from aijobs.errors import LifecycleError, RunsAlone
from aijobs.jobs.lifecycle import LifecycleRepository
from aijobs.jobs.status import FINAL
from aijobs.logs import Outage, fault, get_logger
from aijobs.queues.message import PUT_BACK, JobMessage

logger = get_logger(__name__)

NOT_TAKEN = "not_taken"
SET_APART = "set_apart"
"""The job is a suspect, and waits in this process for its turn to run alone."""


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
        attempts: Attempts,
        lifecycle: LifecycleRepository,
        presence: Presence,
        watcher: Callable[[ExecutionEngine], Watcher],
        abandon: Callable[[], None],
        suspects: Suspects | None = None,
    ) -> None:
        """`abandon` ends the process within a bounded time, because an attempt's code can't be brought to return; it
        doesn't wait for that. Without `suspects` a job that lost a worker runs like any other.
        """
        self._prepare, self._attempts, self._lifecycle = prepare, attempts, lifecycle
        self._presence, self._abandon, self._suspects = presence, abandon, suspects
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
        `PUT_BACK` where nobody can say: the database is away, or this process takes nothing any more. A suspect is
        `SET_APART`, for `run_suspect`.

        The attempt's code has a thread of its own, so that code which does not return when its time is up holds no
        slot of the worker.
        """
        if self._draining:
            return PUT_BACK
        if self._suspects is not None and self._suspects.waits(message.job_id):
            return SET_APART
        return self._run_job(message, self._suspects)

    def run_suspect(self) -> bool:
        """Run the suspect that has waited longest alone in a process of its own; return whether one was run.

        At most one runs at a time, whichever slot asks.
        """
        if self._draining or self._suspects is None:
            return False
        with self._suspects.turn() as message:
            if message is None:
                return False
            if self._run_job(message) == PUT_BACK:
                self._suspects.add(message, fresh=True)
                return False
            return True

    def _run_job(self, message: JobMessage, suspects: Suspects | None = None) -> str:
        """Run the message's job; with `suspects`, queue it there instead if it is a suspect."""
        try:
            run = self._prepare.take(message, suspects=suspects is None)
        except Exception as error:
            if suspects is not None and isinstance(error, RunsAlone):
                suspects.add(message, fresh=error.losses > 1)
                return SET_APART
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

    def _attempt(self, run: Run) -> None:
        try:
            if self._suspects is not None and run.job.is_suspect:
                self._suspects.run(run, self._give_back)
            else:
                self._attempts.run(run)
        finally:
            self._forget(run)

    def _forget(self, run: Run) -> None:
        with self._guard:
            self._runs.pop(run.claim.token, None)

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
            self._attempts.end(run, reason, tries=1)
        finally:
            run.ending.release()

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
        """Stop the watcher and the suspects' child, after `drain`."""
        self._watcher.close()
        if self._suspects is not None:
            self._suspects.close()

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
            logger.error("job.release_failed", **fault(error), **run.fields())
            return
        if job.lifecycle_status in FINAL:  # A cancel was requested meanwhile.
            complete(run, job)
            return
        logger.info("job.released", **run.fields(job))
        run.end("released")
