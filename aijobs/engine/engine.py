"""The one way a job is run: PREPARE, RESOLVE, EXECUTE, PROJECT, COMPLETE. Free of Flask, Huey and Redis."""

from __future__ import annotations

import threading

from aijobs.engine.active_runs import ActiveRuns
from aijobs.engine.attempts import Attempts
from aijobs.engine.child import Child
from aijobs.engine.failure import ErrorLog
from aijobs.engine.isolation import Isolation
from aijobs.engine.outcome import Outcome
from aijobs.engine.prepare import Prepare
from aijobs.engine.run import Run
from aijobs.engine.watcher import Watcher
from aijobs.jobs.errors import RunsAlone
from aijobs.logs import Outage, get_logger
from aijobs.queues.message import JobMessage

logger = get_logger(__name__)


class ExecutionEngine:
    """Runs jobs for one process. Call `start` before the first message, and `drain` and `close` before the end."""

    def __init__(
        self,
        prepare: Prepare,
        attempts: Attempts,
        active: ActiveRuns,
        watcher: Watcher,
        isolation: Isolation | None = None,
    ) -> None:
        """Without `isolation`, a job that lost a worker runs like any other."""
        self._prepare, self._attempts, self._active, self._watcher = prepare, attempts, active, watcher
        self._isolation = isolation
        self._error_log = ErrorLog(logger, Outage(logger, "engine.database"), "engine.failed")

    def start(self) -> None:
        """Start the watcher, which renews leases and handles cancel requests and deadlines."""
        self._watcher.start()

    def execute(self, message: JobMessage) -> Outcome:
        """Run the job of `message`, or another user's if fairness says so. Never raises; all state is in the database.

        The attempt's code has a thread of its own: code that doesn't return when its time is up holds no slot. A job
        that lost a worker is set apart for `run_suspect`. After a recent loss any job runs in a child process.
        """
        if self._active.is_draining:
            return Outcome.PUT_BACK
        if self._isolation is None:
            return self._take(message)
        if self._isolation.waits(message.job_id):
            return Outcome.SET_APART
        if not self._isolation.is_alarmed:
            return self._take(message)
        with self._isolation.child() as child:
            return Outcome.PUT_BACK if child is None else self._take(message, child)

    def run_suspect(self) -> bool:
        """Run the suspect that has waited longest in a child process, alone. Return whether one was run.

        One runs at a time, whichever slot asks. Never waits for a child to start.
        """
        if self._active.is_draining or self._isolation is None:
            return False
        with self._isolation.suspect() as (message, child):
            if message is None:
                return False
            if self._take(message, child, suspect=True) is Outcome.PUT_BACK:
                self._isolation.add(message, fresh=True)
                return False
            return True

    def alarm(self) -> None:
        """Run every job in a child process for a while: a process was lost with its jobs."""
        if self._isolation is not None:
            self._isolation.alarm()

    def drain(self, grace_s: float) -> int:
        """Take no new jobs, wait `grace_s` seconds for running attempts, and release the rest. Return their number."""
        return self._active.drain(grace_s)

    def close(self) -> None:
        """Stop the watcher and the child processes, after `drain`."""
        self._watcher.close()
        if self._isolation is not None:
            self._isolation.close()

    def _take(self, message: JobMessage, child: Child | None = None, *, suspect: bool = False) -> Outcome:
        try:
            run = self._prepare.take(message, suspects=suspect or self._isolation is None)
        except RunsAlone as error:
            if self._isolation is None:
                raise
            self._isolation.add(message, fresh=error.losses > 1)
            return Outcome.SET_APART
        except Exception as error:
            self._error_log.failed(error)
            # While the database is away the queue is left as it is. A single job that can't be read is dropped, because
            # it would hold up all others; the re-drive sends it again.
            return Outcome.NOT_TAKEN if self._prepare.database_answers() else Outcome.PUT_BACK
        self._error_log.worked()
        if run is None:
            return Outcome.NOT_TAKEN
        run.child = child
        return self._run(run)

    def _run(self, run: Run) -> Outcome:
        if self._active.add(run):
            name = f"attempt-{run.lease.job_id}"
            try:
                threading.Thread(target=self._attempt, args=(run,), name=name, daemon=True).start()
            except RuntimeError as error:  # The job waits for a worker that can start a thread.
                logger.error("engine.no_thread", error=str(error), **run.fields())
                self._active.release(run)
                self._active.remove(run)
                return Outcome.PUT_BACK
            with self._active.shown(run):
                run.ended.wait()
        return run.outcome or Outcome.LOST

    def _attempt(self, run: Run) -> None:
        try:
            if run.child is not None and self._isolation is not None:
                self._isolation.run(run, run.child)
            else:
                self._attempts.run(run)
        finally:
            self._active.remove(run)
