"""The writes that end an attempt without success: retried, failed, cancelled or postponed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from sqlalchemy import and_, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from aijobs.ai.billing.usage import UsageLog, mark_lost
from aijobs.ai.errors import ProvidersBusy
from aijobs.db.clock import Clock, read_clock
from aijobs.db.database import TRIES, Database
from aijobs.engine.failure import internal_text
from aijobs.engine.retry import count_retries, wait_before_retry
from aijobs.engine.run import OpenCall, Run
from aijobs.engine.token import CANCELLED
from aijobs.errors import JobError
from aijobs.jobs.errors import LifecycleError
from aijobs.jobs.history import HistoryType
from aijobs.jobs.lease import JobErrorInfo, Lease
from aijobs.jobs.lifecycle.confirm import freed
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.models import AiJob, AiJobEvent
from aijobs.logs import get_logger

logger = get_logger(__name__)

PROVIDER_UNAVAILABLE = "PROVIDER_UNAVAILABLE"
JITTER = 0.1
"""A wait before a retry is lengthened by up to this part of it."""


class EndWrites:
    """Writes the end of an attempt: one transaction for the job and the usage row of its last provider call.

    A method raises `LifecycleError` if the lease is gone; nothing is written then.
    """

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
        """`patience`: how long a job is postponed for its providers before that is an error of the job.
        `chance`: a random number from 0 to 1 for the jitter, so that jobs that failed together don't return together.
        """
        self._database, self._clock = database, clock
        self._lifecycle, self._usage = lifecycle, usage
        self._patience, self._chance = patience, chance

    def fail(self, run: Run, error: JobError, cause: BaseException, *, tries: int = TRIES) -> AiJob:
        """Schedule a retry or fail the job. If the usage row can't be written, the job's end is written without it."""
        text = internal_text(cause)
        return self._write(run, error.code, lambda session: self._retry_or_fail(session, run, error, text), tries)

    def cancel(self, run: Run, *, tries: int = TRIES) -> AiJob:
        """End the job `cancelled`."""
        return self._write(
            run,
            CANCELLED,
            lambda session: self._lifecycle.mark_cancelled(run.lease, session, duration_ms=run.stopwatch.ms),
            tries,
        )

    def postpone(self, run: Run, busy: ProvidersBusy) -> AiJob:
        """Release the lease until a provider is worth asking: no retry is used up.

        A job that has waited for `patience` fails as after any error. One that waits for a free slot of a provider
        that works (`busy.crowded`) waits without a limit.
        """
        if busy.crowded:
            return self._lifecycle.release(run.lease, wait=busy.wait)
        waited = self._database.query(lambda session: _waited_for_providers(session, self._clock, run.lease))
        if waited >= self._patience:
            error = JobError(PROVIDER_UNAVAILABLE, f"waited {waited} for a provider", retry_after=busy.wait)
            return self.fail(run, error, error)
        return self._lifecycle.release(run.lease, wait=busy.wait, error_code=PROVIDER_UNAVAILABLE)

    def close_call(self, run: Run, error_code: str) -> None:
        """Close the usage row of an attempt that has ended. If the call's answer still comes, it is closed again."""
        call = _closed(run, error_code)
        self._database.write(lambda session: self._close(session, call))

    def _write(self, run: Run, code: str, change: Callable[[Session], AiJob], tries: int) -> AiJob:
        call = _closed(run, code)

        def with_call(session: Session) -> AiJob:
            job = change(session)
            self._close(session, call)
            return job

        def without_call(session: Session) -> AiJob:
            job = change(session)
            mark_lost(session, self._clock, run.lease.job_id, run.lease.attempt_no)
            return job

        try:
            return self._database.write(with_call, confirm=freed(run.lease), tries=tries)
        except Exception as error:
            if call is None or isinstance(error, LifecycleError):
                raise
            logger.error("job.settle_failed", error=type(error).__name__, **run.fields(error_code=code))
        job = self._database.write(without_call, confirm=freed(run.lease), tries=tries)
        try:
            self.close_call(run, code)
        except Exception as error:
            logger.error("usage.close_failed", error=type(error).__name__, **run.fields(job, code))
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
        if wait is None:
            info = JobErrorInfo.of(error.code, text)
            return self._lifecycle.mark_failed(run.lease, info, session, duration_ms=ms)
        return self._lifecycle.release_for_retry(
            run.lease,
            read_clock(session, self._clock) + wait * (1 + JITTER * self._chance()),
            error_code=error.code,
            duration_ms=ms,
            faults=error.faults,
            session=session,
        )

    def _close(self, session: Session, call: OpenCall | None) -> None:
        if call is not None:
            self._usage.close(session, call.usage_id, call.result)


def _waited_for_providers(session: Session, clock: Clock, lease: Lease) -> timedelta:
    """Return how long the job has waited for its providers: since the first of its last postponements in a row.

    In the history three rows end such a series: a scheduled retry; a postponement for a slot of a working provider; and
    an earlier attempt that called a provider and was not postponed. An attempt that called one and was postponed was
    the breaker's probe, and found that the outage goes on.
    """
    of_job, postponed = AiJobEvent.job_id == lease.job_id, AiJobEvent.type == HistoryType.POSTPONED
    end = aliased(AiJobEvent)
    was_probe = exists().where(
        end.job_id == AiJobEvent.job_id, end.attempt_no == AiJobEvent.attempt_no, end.type == HistoryType.POSTPONED
    )
    ends_it = or_(
        AiJobEvent.type == HistoryType.RETRY_SCHEDULED,
        and_(postponed, AiJobEvent.error_code.is_(None)),
        and_(
            AiJobEvent.type == HistoryType.PROVIDER_CALLED,
            AiJobEvent.attempt_no < lease.attempt_no,
            ~was_probe.correlate(AiJobEvent),
        ),
    )
    last_end = session.execute(select(func.max(AiJobEvent.seq)).where(of_job, ends_it)).scalar() or 0
    since = session.execute(
        select(func.min(AiJobEvent.at)).where(of_job, postponed, AiJobEvent.seq > last_end)
    ).scalar()
    return read_clock(session, clock) - since if since is not None else timedelta()


def _closed(run: Run, error_code: str) -> OpenCall | None:
    """Return the attempt's open call with `error_code` as its result."""
    call = run.call  # Read once: the attempt's own thread clears it after saving the answer.
    if call is None:
        return None
    return replace(call, result=replace(call.result, error_code=error_code))
