"""How an attempt that went wrong ends: tried again, failed or cancelled, with its usage row closed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from sqlalchemy import and_, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from aijobs.ai.billing.usage import UsageLog, mark_lost
from aijobs.db.clock import Clock, read_clock
from aijobs.db.database import TRIES, Database
from aijobs.engine.failure import internal_text
from aijobs.engine.retry import count_retries, wait_before_retry
from aijobs.engine.run import OpenCall, Run
from aijobs.engine.token import CANCELLED
from aijobs.errors import JobError, LifecycleError, ProvidersBusy
from aijobs.jobs.changes import freed
from aijobs.jobs.claim import Claim
from aijobs.jobs.lifecycle import JobErrorInfo, LifecycleRepository
from aijobs.jobs.models import AiJob, AiJobEvent
from aijobs.logs import get_logger

logger = get_logger(__name__)

PROVIDER_UNAVAILABLE = "PROVIDER_UNAVAILABLE"
JITTER = 0.1
"""The longest part of a wait that is put on top of it."""


class Settle:
    """The one place where an error becomes a change of the job."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        lifecycle: LifecycleRepository,
        usage: UsageLog,
        *,
        patience: timedelta,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """A job waits up to `patience`, uncounted, from when it was first told that its providers are not to be asked.

        `chance` is a number from 0 to 1, anew at each call: jobs that failed together don't come back together.
        """
        self._database, self._clock = database, clock
        self._lifecycle, self._usage = lifecycle, usage
        self._patience, self._chance = patience, chance

    def settle(self, run: Run, error: JobError, cause: BaseException, *, tries: int = TRIES) -> AiJob:
        """Record `error` under the claim, in one transaction with the usage row it closes.

        Where writing that down fails, the same change is tried once more without what the call came to: its row is
        given up as lost, then closed if it can be. What fails then is left to the reaper. Raises `LifecycleError`
        where the claim is gone; the usage row is closed all the same.
        """
        call, text = _closed(run, error.code), internal_text(cause)
        try:
            return self._database.write(
                lambda s: self._record(s, run, error, text, call), settle=freed(run.claim), tries=tries
            )
        except LifecycleError:
            self.close_call(run, error.code)
            raise
        except Exception as second:
            logger.error("job.settle_failed", error=type(second).__name__, **run.fields(error_code=error.code))
            return self._settle_alone(run, error, text, tries)

    def _settle_alone(self, run: Run, error: JobError, text: str, tries: int) -> AiJob:
        """The job's change, which must not hang on what can't be written about its call."""

        def record(session: Session) -> AiJob:
            job = self._record(session, run, error, text, None)
            mark_lost(session, self._clock, run.claim.job_id, run.claim.attempt_no)
            return job

        job = self._database.write(record, settle=freed(run.claim), tries=tries)
        try:
            self.close_call(run, error.code)
        except Exception as third:
            logger.error("usage.close_failed", error=type(third).__name__, **run.fields(job, error.code))
        return job

    def postpone(self, run: Run, busy: ProvidersBusy) -> AiJob:
        """Give the lease back until a provider is worth asking: no error of the job, and no retry is used up. Where the
        job has waited for them too long, an error like any other. For its turn at one that is well it waits on.
        """
        if busy.crowded:
            return self._lifecycle.release(run.claim, wait=busy.wait)
        waited = self._database.look(lambda session: _waited_for_providers(session, self._clock, run.claim))
        if waited >= self._patience:
            error = JobError(PROVIDER_UNAVAILABLE, f"waited {waited} for a provider", retry_after=busy.wait)
            return self.settle(run, error, error)
        return self._lifecycle.release(run.claim, wait=busy.wait, error_code=PROVIDER_UNAVAILABLE)

    def cancel(self, run: Run, *, tries: int = TRIES) -> AiJob:
        """End the job `cancelled` under the claim, and close the usage row of its call."""
        call = _closed(run, CANCELLED)

        def cancel(session: Session) -> AiJob:
            job = self._lifecycle.mark_cancelled(run.claim, session, duration_ms=run.stopwatch.ms)
            self._close(session, call)
            return job

        return self._database.write(cancel, settle=freed(run.claim), tries=tries)

    def close_call(self, run: Run, error_code: str) -> None:
        """Close the usage row of an attempt that has no say over its job any more: the money is gone.

        The call stays the run's own: its answer may still come, and is closed again with what it cost.
        """
        call = _closed(run, error_code)
        self._database.write(lambda s: self._close(s, call))

    def _record(self, session: Session, run: Run, error: JobError, text: str, call: OpenCall | None) -> AiJob:
        if error.code == CANCELLED and run.token.reason == CANCELLED:
            job = self._lifecycle.mark_cancelled(run.claim, session, duration_ms=run.stopwatch.ms)
        else:
            job = self._retry_or_fail(session, run, error, text)
        self._close(session, call)
        return job

    def _retry_or_fail(self, session: Session, run: Run, error: JobError, text: str) -> AiJob:
        wait = wait_before_retry(
            error,
            run.definition,
            retry_count=run.job.retry_count,
            max_retries=run.job.max_retry_count,
            retried=count_retries(session, run.job),
        )
        ms = run.stopwatch.ms
        if wait is not None:
            wait *= 1 + JITTER * self._chance()
        if wait is None:
            info = JobErrorInfo.of(error.code, text)
            return self._lifecycle.mark_failed(run.claim, info, session, duration_ms=ms)
        return self._lifecycle.release_for_retry(
            run.claim,
            read_clock(session, self._clock) + wait,
            error_code=error.code,
            duration_ms=ms,
            faults=error.faults,
            session=session,
        )

    def _close(self, session: Session, call: OpenCall | None) -> None:
        if call is not None:
            self._usage.close(session, call.usage_id, call.result)


def _waited_for_providers(session: Session, clock: Clock, claim: Claim) -> timedelta:
    """How long ago an outage first put the job off, of the times in a row that lead up to this attempt.

    Told by the history. A row ends what came before it where the job was tried again, where it was put off by a
    provider that is well, or where it called one and wasn't put off: a call that was put off was the probe, and found
    the outage going on. The time before the first, in a backlog or for a `Retry-After`, was no wait for a provider.
    """
    of_job, put_off = AiJobEvent.job_id == claim.job_id, AiJobEvent.type == "postponed"
    end = aliased(AiJobEvent)
    was_probe = exists().where(
        end.job_id == AiJobEvent.job_id, end.attempt_no == AiJobEvent.attempt_no, end.type == "postponed"
    )
    ends_it = or_(
        AiJobEvent.type == "retry_scheduled",
        and_(put_off, AiJobEvent.error_code.is_(None)),
        and_(
            AiJobEvent.type == "provider_called",
            AiJobEvent.attempt_no < claim.attempt_no,
            ~was_probe.correlate(AiJobEvent),
        ),
    )
    last_end = session.execute(select(func.max(AiJobEvent.seq)).where(of_job, ends_it)).scalar() or 0
    since = session.execute(select(func.min(AiJobEvent.at)).where(of_job, put_off, AiJobEvent.seq > last_end)).scalar()
    return read_clock(session, clock) - since if since is not None else timedelta()


def _closed(run: Run, error_code: str) -> OpenCall | None:
    """The attempt's open call with the error that it came to."""
    call = run.call  # Read once: the attempt's own thread takes it away where it saved the answer.
    if call is None:
        return None
    return replace(call, result=replace(call.result, error_code=error_code))
