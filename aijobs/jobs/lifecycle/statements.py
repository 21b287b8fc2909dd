"""The statements of locking and ending, put together once; only their parameters change."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Select, Subquery, Text, and_, bindparam, case, cast, null, select

from aijobs.jobs.conditions import NO_CANCEL, PAUSED, WAITS
from aijobs.jobs.lease import Lease, LockedRow
from aijobs.jobs.models import AiJob, AiJobSnapshot
from aijobs.jobs.status import JobState
from aijobs.outbox.models import OutboxEvent
from aijobs.outbox.repository import SEEN_EVENT

THE_JOB = AiJob.id == bindparam("of_job")
"""The job that the parameters of `of` name."""
HELD = and_(
    THE_JOB,
    AiJob.lifecycle_status == JobState.RUNNING,
    AiJob.locked_by == bindparam("of_token"),
    AiJob.attempt_no == bindparam("of_attempt"),
)
"""The job, held under the lease that they name."""


def of(target: str | Lease) -> dict[str, Any]:
    """Return the parameters of `THE_JOB` for a job id, or of `HELD` for a lease."""
    if isinstance(target, Lease):
        return {"of_job": target.job_id, "of_token": target.token, "of_attempt": target.attempt_no}
    return {"of_job": target}


RUNNABLE = and_(WAITS, NO_CANCEL, ~PAUSED)
"""A worker may lock the job once it is due."""
ASKED, SAVED = 10, 90
"""The progress of an attempt that calls a provider, and of one whose answer is saved."""
FIRST_PROGRESS = case((AiJob.output_hash.is_not(None), SAVED), else_=0)
FREE = {"locked_by": null(), "locked_at": null(), "lock_until": null()}
"""The columns of a job that nobody holds."""
LOCK_ROW = select(*(getattr(AiJob, part.name) for part in fields(LockedRow))).where(HELD, NO_CANCEL).with_for_update()
LOCK_UNTIL = select(AiJob.lock_until).where(THE_JOB).with_for_update(key_share=True)
LOCK_UNTIL_NOW = select(AiJob.lock_until).where(THE_JOB).with_for_update(key_share=True, skip_locked=True)
"""The same; no row if another transaction has it."""
HELD_JOB = (
    select(AiJob, cast(AiJobSnapshot.content, Text))
    .outerjoin(AiJobSnapshot, and_(AiJobSnapshot.job_id == AiJob.id, AiJob.output_hash.is_(None)))
    .where(HELD)
)
"""A held job and its input, unless its output is saved."""


def locked_job(holders: Subquery) -> Select[*tuple[Any, ...]]:
    """Build the query for a job that was just locked: the job, the number of jobs that its user holds, its input unless
    its output is saved, and the event `of_event` if it asks for this job.
    """
    with_it = and_(holders.c.queue_name == AiJob.queue_name, holders.c.holder == AiJob.user_id)
    return (
        select(AiJob, holders.c.number, cast(AiJobSnapshot.content, Text), *SEEN_EVENT)
        .join(holders, with_it)
        .outerjoin(AiJobSnapshot, and_(AiJobSnapshot.job_id == AiJob.id, AiJob.output_hash.is_(None)))
        .outerjoin(OutboxEvent, and_(OutboxEvent.id == bindparam("of_event"), OutboxEvent.aggregate_id == AiJob.id))
        .where(THE_JOB, AiJob.locked_by == bindparam("of_token"))
        .execution_options(populate_existing=True)
    )


@lru_cache  # One expression for each percentage, so that its statement is kept.
def raised_to(percent: int) -> ColumnElement[int]:
    """Build the progress that is at least `percent`: within an attempt it never falls."""
    return case((AiJob.progress < percent, percent), else_=AiJob.progress)
