"""Append to a job's history, in the transaction of the change."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.statements import insert_row
from aijobs.jobs.lease import KnownJob
from aijobs.jobs.models import AiJobEvent

WORKER = "worker"
REAPER = "reaper"
DISPATCHER = "dispatcher"
SYSTEM = "system"


class HistoryType(StrEnum):
    """The types in `ai_job_events.type`."""

    CREATED = "created"
    LOCKED = "locked"
    PROVIDER_CALLED = "provider_called"
    OUTPUT_SAVED = "output_saved"
    RETRY_SCHEDULED = "retry_scheduled"
    RELEASED = "released"
    POSTPONED = "postponed"
    LEASE_LOST = "lease_lost"
    CANCEL_REQUESTED = "cancel_requested"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


def record(
    session: Session,
    clock: Clock,
    job: KnownJob,
    event_type: HistoryType,
    *,
    actor: str = WORKER,
    instance: str | None = None,
    error_code: str | None = None,
    duration_ms: int | None = None,
) -> None:
    """Append one row. Its number is `job.event_seq`, which the UPDATE of this change has raised."""
    insert_row(
        session,
        AiJobEvent,
        job_id=job.id,
        seq=job.event_seq,
        type=event_type,
        attempt_no=job.attempt_no,
        actor=actor,
        instance=instance,
        error_code=error_code,
        duration_ms=duration_ms,
        at=clock.now(),
    )
