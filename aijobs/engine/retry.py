"""Whether and when another attempt follows a failed one: the rule of its code, within the definition's limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from aijobs.definitions.definition import JobDefinition
from aijobs.errors import JobError, Retried, describe, is_internal
from aijobs.jobs.history import HistoryType
from aijobs.jobs.lease import HeldJob
from aijobs.jobs.models import AiJobEvent


def wait_before_retry(
    error: JobError, definition: JobDefinition, *, retry_count: int, max_retries: int, retried: Mapping[str, int]
) -> timedelta | None:
    """Return how long to wait before the next attempt, or None if there is none.

    The n-th retry waits `delay` · 2^(n−1) ms, and at least what the provider asked for. `retried` is how often the job
    was retried for each code (`count_retries`).
    """
    if retry_count >= max_retries or not _is_retried(error.code, definition, retried):
        return None
    wait = timedelta(milliseconds=definition.execution.retry_backoff.delay * 2**retry_count)
    return max(wait, error.retry_after) if error.retry_after else wait


def _is_retried(code: str, definition: JobDefinition, retried: Mapping[str, int]) -> bool:
    rule = describe(code).retried
    if rule is Retried.BY_DEFINITION:
        return definition.execution.abort_strategy == "retry"
    if rule is Retried.ONCE:
        return not any(each == code or (is_internal(each) and is_internal(code)) for each in retried)
    return rule in (Retried.BACKOFF, Retried.REPROMPT)


def count_retries(session: Session, job: HeldJob) -> Counter[str]:
    """Return how often the job was retried for each code, by its history."""
    if not job.retry_count:
        return Counter()
    rows = session.execute(
        select(AiJobEvent.error_code, func.count())
        .where(AiJobEvent.job_id == job.id, AiJobEvent.type == HistoryType.RETRY_SCHEDULED)
        .group_by(AiJobEvent.error_code)
    )
    return Counter({code: times for code, times in rows if code is not None})
