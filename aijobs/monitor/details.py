"""Read the rows around jobs: events, artifacts, history, provider calls, snapshots. No payloads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.ai.models import AiUsageLog
from aijobs.jobs.models import AiJobArtifact, AiJobEvent, AiJobSnapshot
from aijobs.monitor.outbox import OUTBOX_COLUMNS
from aijobs.monitor.views import Artifact, HistoryEntry, OutboxRow, SnapshotDescription, UsageRow
from aijobs.outbox.models import OutboxEvent, OutboxEventType

_HISTORY_LIMIT = 1000


def find_queued_at(session: Session, job_ids: Collection[str]) -> dict[str, datetime]:
    """Return when the first enqueue event of each job was published. Jobs whose event wasn't are left out."""
    rows = session.execute(
        select(OutboxEvent.aggregate_id, OutboxEvent.created_at, OutboxEvent.id, OutboxEvent.published_at).where(
            OutboxEvent.aggregate_id.in_(job_ids), OutboxEvent.event_type == OutboxEventType.ENQUEUE
        )
    )
    by_job: dict[str, list[Any]] = {}
    for row in rows:
        by_job.setdefault(row.aggregate_id, []).append(row)
    first = {job_id: first_published(events) for job_id, events in by_job.items()}
    return {job_id: at for job_id, at in first.items() if at is not None}


def first_published(events: Sequence[Any]) -> datetime | None:
    """Return `published_at` of the oldest event."""
    at: datetime | None = min(events, key=lambda e: (e.created_at, e.id)).published_at if events else None
    return at


def find_artifacts(session: Session, job_ids: Collection[str]) -> dict[str, tuple[Artifact, ...]]:
    """Return the artifacts of each job, in order."""
    if not job_ids:
        return {}
    rows = session.execute(
        select(AiJobArtifact.job_id, AiJobArtifact.artifact_type, AiJobArtifact.artifact_id)
        .where(AiJobArtifact.job_id.in_(job_ids))
        .order_by(AiJobArtifact.job_id, AiJobArtifact.ordinal, AiJobArtifact.artifact_id)
    )
    made: dict[str, list[Artifact]] = {}
    for job_id, artifact_type, artifact_id in rows:
        made.setdefault(job_id, []).append(Artifact(artifact_type, artifact_id))
    return {job_id: tuple(artifacts) for job_id, artifacts in made.items()}


def find_outbox(session: Session, job_id: str) -> tuple[OutboxRow, ...]:
    """Return all events of a job, oldest first."""
    rows = session.execute(
        select(*OUTBOX_COLUMNS)
        .where(OutboxEvent.aggregate_id == job_id)
        .order_by(OutboxEvent.created_at, OutboxEvent.id)
        .limit(_HISTORY_LIMIT)
    )
    return tuple(OutboxRow(*row) for row in rows)


def find_history(session: Session, job_id: str) -> tuple[HistoryEntry, ...]:
    """Return a job's history, in order."""
    columns = [getattr(AiJobEvent, name) for name in HistoryEntry.__dataclass_fields__]
    rows = session.execute(
        select(*columns).where(AiJobEvent.job_id == job_id).order_by(AiJobEvent.seq).limit(_HISTORY_LIMIT)
    )
    return tuple(HistoryEntry(*row) for row in rows)


def find_usage(session: Session, job_id: str) -> tuple[UsageRow, ...]:
    """Return a job's provider calls, in order."""
    columns = [getattr(AiUsageLog, name) for name in UsageRow.__dataclass_fields__]
    rows = session.execute(
        select(*columns)
        .where(AiUsageLog.job_id == job_id)
        .order_by(AiUsageLog.attempt_no, AiUsageLog.call_no)
        .limit(_HISTORY_LIMIT)
    )
    return tuple(UsageRow(*row) for row in rows)


def describe_snapshot(session: Session, job_id: str) -> SnapshotDescription | None:
    """Describe a job's input without its content; None if it has expired."""
    columns = [getattr(AiJobSnapshot, name) for name in SnapshotDescription.__dataclass_fields__]
    row = session.execute(select(*columns).where(AiJobSnapshot.job_id == job_id)).one_or_none()
    return None if row is None else SnapshotDescription(*row)
