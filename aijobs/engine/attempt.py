"""The code of one attempt: its stages, and how each of their errors ends it.

The same in a worker process and in a suspect's child.
"""

from __future__ import annotations

from aijobs.db.database import TRIES
from aijobs.engine.complete import complete
from aijobs.engine.execute import Execute
from aijobs.engine.failure import as_job_error
from aijobs.engine.project import Project
from aijobs.engine.resolve import Resolve
from aijobs.engine.run import Run
from aijobs.engine.settle import PROVIDER_UNAVAILABLE, Settle
from aijobs.engine.token import CANCELLED, LOST, RELEASED, TIMEOUT
from aijobs.errors import CancelRequested, JobError, LifecycleError, ProvidersBusy
from aijobs.jobs.status import FINAL
from aijobs.logs import fault, get_logger

logger = get_logger(__name__)


class Attempts:
    """Runs attempts of this process, each in the thread that asks for it."""

    def __init__(self, resolve: Resolve, execute: Execute, project: Project, settle: Settle) -> None:
        self._resolve, self._execute, self._project = resolve, execute, project
        self._settle = settle

    def run(self, run: Run) -> None:
        """Walk through the stages and write the attempt's end; doesn't raise, and leaves `run` ended."""
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
                    self.end(run, CANCELLED, TRIES)
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
            logger.error("usage.close_failed", **fault(error), **run.fields(error_code=code))

    def end(self, run: Run, reason: str, tries: int) -> None:
        """End a run from outside its code, cancelled or out of time; `run.ending` is held.

        Changes nothing where the claim is gone, and raises what the database does.
        """
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
