"""Append to a job's history, in the transaction of the change."""

from __future__ import annotations

from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.statements import insert_row
from aijobs.jobs.lease import KnownJob
from aijobs.jobs.models import AiJobEvent

WORKER = "worker"
REAPER = "reaper"
DISPATCHER = "dispatcher"
SYSTEM = "system"


def record(
    session: Session,
    clock: Clock,
    job: KnownJob,
    event_type: str,
    *,
    seq: int | None = None,
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
        seq=job.event_seq if seq is None else seq,
        type=event_type,
        attempt_no=job.attempt_no,
        actor=actor,
        instance=instance,
        error_code=error_code,
        duration_ms=duration_ms,
        at=clock.now(),
    )
