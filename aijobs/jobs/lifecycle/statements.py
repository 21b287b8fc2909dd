"""The statements of locking and ending, put together once; only their parameters change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, FromClause, Select, Text, and_, bindparam, case, cast, null, select

from aijobs.db.statements import constant
from aijobs.jobs.conditions import NO_CANCEL, PAUSED, WAITS
from aijobs.jobs.lease import HeldJob, Lease, Locked
from aijobs.jobs.lifecycle.transition import JOBS, OF_JOB
from aijobs.jobs.models import AiJob, AiJobSnapshot
from aijobs.jobs.status import JobState
from aijobs.outbox.models import OutboxEvent
from aijobs.outbox.repository import OF_EVENT, asks_for

THE_JOB = AiJob.id == OF_JOB
"""The job that the parameters of `of` name."""
OF_TOKEN = bindparam("of_token", type_=JOBS.c.locked_by.type)
HELD = and_(
    THE_JOB,
    AiJob.lifecycle_status == constant(JobState.RUNNING),
    AiJob.locked_by == OF_TOKEN,
    AiJob.attempt_no == bindparam("of_attempt"),
)
"""The job, held under the lease that they name."""


def of(target: str | Lease) -> dict[str, Any]:
    """Return the parameters of `THE_JOB` for a job id, or of `HELD` for a lease."""
    if isinstance(target, Lease):
        return {"of_job": target.job_id, "of_token": target.token, "of_attempt": target.attempt_no}
    return {"of_job": target}


TO_OUTPUT = bindparam("to_output", type_=JOBS.c.validated_output.type)
TO_HASH = bindparam("to_output_hash", type_=JOBS.c.output_hash.type)
"""The output that an attempt saves."""
RUNNABLE = and_(WAITS, NO_CANCEL, PAUSED.is_(False))
"""A worker may lock the job once it is due. `IS FALSE`, because PostgreSQL plans NOT EXISTS as a join: slower."""
ASKED, SAVED = 10, 90
"""The progress of an attempt that calls a provider, and of one whose answer is saved."""
FIRST_PROGRESS = case((AiJob.output_hash.is_not(None), SAVED), else_=0)
FREE = {"locked_by": null(), "locked_at": null(), "lock_until": null()}
"""The columns of a job that nobody holds."""
LOCK_ROW = select(AiJob.output_hash, AiJob.validated_output).where(HELD, NO_CANCEL).with_for_update()
LOCK_UNTIL = select(AiJob.lock_until).where(THE_JOB).with_for_update(key_share=True)
LOCK_UNTIL_NOW = select(AiJob.lock_until).where(THE_JOB).with_for_update(key_share=True, skip_locked=True)
"""The same; no row if another transaction has it."""


def read_started(source: FromClause) -> Select[Any]:
    """Build the query for a `HeldJob`, its input unless its output is saved, and the event `of_event`, from the job's
    row.
    """
    job = source.c
    snapshot = and_(AiJobSnapshot.job_id == job.id, job.output_hash.is_(None))
    columns = (job[part.name] for part in fields(HeldJob))
    query = select(*columns, cast(AiJobSnapshot.content, Text), OF_EVENT)
    return query.select_from(source.outerjoin(AiJobSnapshot, snapshot))


def read_held(source: FromClause) -> Select[Any]:
    """Do the same, with the event only if it asks for the attempt."""
    event = select(OutboxEvent.id).where(asks_for(source.c)).scalar_subquery()
    started = read_started(source)
    return started.with_only_columns(*list(started.selected_columns)[:-1], event)


def locked_of(row: Sequence[Any]) -> Locked:
    """Return what a row of `read_held` says."""
    *columns, content, event_id = row
    return Locked(HeldJob(*columns), event_id, content)


FIND_HELD = read_held(JOBS).where(THE_JOB, AiJob.locked_by == OF_TOKEN)
"""The job that a token holds."""


@lru_cache  # One expression for each percentage, so that its statement is kept.
def raised_to(percent: int) -> ColumnElement[int]:
    """Build the progress that is at least `percent`: within an attempt it never falls."""
    return case((AiJob.progress < percent, percent), else_=AiJob.progress)
