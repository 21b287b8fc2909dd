"""Builders of rows, for tests of code that reads the database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from aijobs.ai.models import AiUsageLog
from aijobs.db.database import Database
from aijobs.db.schema import upgrade
from aijobs.ids import new_id
from aijobs.jobs.models import AiJob, AiJobArtifact, AiJobEvent, AiJobSnapshot
from aijobs.outbox.models import OutboxEvent, OutboxEventType, OutboxState

BEGIN = datetime(2026, 3, 1, 8, 0, tzinfo=UTC)


def prepare_database(url: str) -> None:
    """Migrate an empty database."""
    database = Database(url)
    upgrade(database.engine)
    database.dispose()


def build_job(**changes: Any) -> AiJob:
    """Build a queued synthetic job of user u1."""
    return AiJob(**{**job_columns(**changes), "lifecycle_status": "queued", **changes})


def job_columns(**changes: Any) -> dict[str, Any]:
    """Build the columns of a new synthetic job of user u1."""
    job_id = changes.pop("id", None) or new_id()
    values: dict[str, Any] = {
        "id": job_id,
        "root_id": job_id,
        "user_id": "u1",
        "job_type": "synthetic",
        "target_type": "note",
        "target_id": "n1",
        "queue_name": "ai-interactive",
        "priority": 50,
        "input_schema_version": "1",
        "output_schema_version": "1",
        "credential_mode": "platform_key",
        "trigger_type": "user",
        "max_retry_count": 2,
        "created_at": BEGIN,
    }
    return {**values, **changes}


def ended(status: str, **changes: Any) -> dict[str, Any]:
    """Return the fields of a job in a final state."""
    times = {"started_at": BEGIN + timedelta(seconds=1), "finished_at": BEGIN + timedelta(seconds=5)}
    if status == "succeeded":
        times["progress"] = 100
    if status == "failed":
        times["error_code"] = "PROVIDER_UNAVAILABLE"
    return {"lifecycle_status": status, "attempt_no": 1, **times, **changes}


def held(**changes: Any) -> dict[str, Any]:
    """Return the fields of a job that a worker runs."""
    return {
        "lifecycle_status": "running",
        "attempt_no": 1,
        "started_at": BEGIN,
        "locked_by": "host~boot~1~77~5~ab/tok",
        "locked_at": BEGIN,
        "lock_until": BEGIN + timedelta(seconds=60),
        **changes,
    }


def build_event(job: AiJob, **changes: Any) -> OutboxEvent:
    """Build the first enqueue event of `job`, published two seconds after its creation."""
    event_type = changes.get("event_type", OutboxEventType.ENQUEUE)
    values: dict[str, Any] = {
        "event_type": event_type,
        "aggregate_type": "AiJob",
        "aggregate_id": job.id,
        "dedupe_key": f"{event_type}:{new_id()}",
        "payload": {"jobId": job.id},
        "queue_name": job.queue_name,
        "status": OutboxState.PUBLISHED,
        "available_at": job.created_at,
        "created_at": job.created_at,
        "published_at": job.created_at + timedelta(seconds=2),
        "message_version": 1,
        "message_key_id": "k1",
    }
    return OutboxEvent(**{**values, **changes})


def build_snapshot(job: AiJob, content: Any) -> AiJobSnapshot:
    """Build the snapshot of `job`."""
    return AiJobSnapshot(
        job_id=job.id,
        schema_version="1",
        content=content,
        content_hash="0" * 64,
        content_bytes=10,
        redaction_version="1",
        expires_at=job.created_at + timedelta(days=30),
    )


def build_call(job: AiJob, **changes: Any) -> AiUsageLog:
    """Build a provider call of `job` that was answered and has a price."""
    values: dict[str, Any] = {
        "job_id": job.id,
        "attempt_no": 1,
        "call_no": 1,
        "user_id": job.user_id,
        "state": "done",
        "provider": "local",
        "model": "m",
        "credential_mode": "platform_key",
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "cost_micros": 7,
        "currency": "USD",
        "billed": "yes",
        "started_at": job.created_at,
        "finished_at": job.created_at + timedelta(seconds=1),
    }
    return AiUsageLog(**{**values, **changes})


def build_history(job: AiJob, *types: str) -> list[AiJobEvent]:
    """Build history rows of these types, one per second."""
    return [
        AiJobEvent(
            job_id=job.id, seq=n, type=t, attempt_no=0, actor="user:u1", at=job.created_at + timedelta(seconds=n)
        )
        for n, t in enumerate(types, start=1)
    ]


def build_artifacts(job: AiJob, *ids: str) -> list[AiJobArtifact]:
    """Build artifacts in the order of `ids`."""
    return [
        AiJobArtifact(job_id=job.id, artifact_type="Flashcard", artifact_id=i, ordinal=n) for n, i in enumerate(ids)
    ]


def add(database: Database, *rows: Any) -> None:
    """Write rows in the given order, parents first, in one transaction."""
    with database.transaction() as session:
        for row in rows:
            session.add(row)
            session.flush()
