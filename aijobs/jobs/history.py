"""Append to a job's history, in the transaction of the change."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, cast

from sqlalchemy import ColumnElement, Table, bindparam

from aijobs.db.clock import Clock
from aijobs.db.database import Unit
from aijobs.db.statements import insert_row
from aijobs.jobs.models import AiJob, AiJobEvent

_EVENTS = cast(Table, AiJobEvent.__table__)
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


def history_row(job: Any, clock: Clock) -> dict[str, ColumnElement[Any]]:
    """Return the row of a change as expressions of the columns of `job` and of the parameters `note_parameters`."""
    given = {name: bindparam(f"note_{name}", type_=_EVENTS.c[name].type) for name in _NOTED}
    return {"job_id": job.id, "seq": job.event_seq, "attempt_no": job.attempt_no, "at": clock.now(), **given}


def note_parameters(
    event_type: HistoryType,
    *,
    actor: str = WORKER,
    instance: str | None = None,
    error_code: str | None = None,
    duration_ms: int | None = None,
) -> dict[str, Any]:
    """Return the parameters of `history_row`."""
    return dict(zip(_NOTE_NAMES, (event_type, actor, instance, error_code, duration_ms), strict=True))


_NOTED = ("type", "actor", "instance", "error_code", "duration_ms")
_NOTE_NAMES = tuple(f"note_{name}" for name in _NOTED)


def record(
    unit: Unit,
    clock: Clock,
    job: AiJob,
    event_type: HistoryType,
    *,
    actor: str = WORKER,
    instance: str | None = None,
    error_code: str | None = None,
    duration_ms: int | None = None,
) -> None:
    """Append one row. Its number is `job.event_seq`, which the UPDATE of this change has raised."""
    insert_row(
        unit,
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
