"""Very many sound jobs with all that belongs to them: the first are written as rows, the others copied from those."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Table, case, func, insert, literal, null, select

from aijobs.db.database import Base, Database
from aijobs.jobs.history import WORKER
from aijobs.jobs.status import END_EVENTS
from aijobs.outbox.models import OutboxEventType
from tests.support.rows import BEGIN

TEMPLATE = 10_000
CHUNK = 1_000
TABLES = ("ai_jobs", "ai_job_events", "ai_job_artifacts", "ai_usage_logs", "outbox_events")
"""What grows with the jobs, parents first."""

HISTORY = {
    "succeeded": ("created", "locked", "provider_called", "output_saved", "succeeded"),
    "failed": ("created", "locked", "provider_called", "failed"),
    "cancelled": ("created", "cancel_requested", "cancelled"),
    "running": ("created", "locked"),
    "queued": ("created",),
}
STATES = ("queued", "running", "cancelled", "failed", "failed", *["succeeded"] * 95)
"""One after the other, and again from the start."""
OUTPUT = {"cards": [{"front": "What is osmosis?", "back": "The movement of water across a membrane."}] * 4}
FOR_EVER = BEGIN + timedelta(days=36_500)

_COPY_NUMBER = 8
"""Characters that tell copies apart, at the start of each id and key."""
_MARKED = frozenset(
    "id job_id root_id aggregate_id artifact_id dedupe_key idempotency_key user_id target_id".split(),
)

Row = dict[str, Any]


def seed(database: Database, jobs: int) -> None:
    """Fill an empty, migrated database with `jobs` jobs (a multiple of 10,000, or fewer than that)."""
    first = min(jobs, TEMPLATE)
    for start in range(0, first, CHUNK):
        with database.engine.begin() as connection:
            _write(connection, range(start, min(start + CHUNK, first)))
    for copy in range(1, jobs // first):
        with database.engine.begin() as connection:
            for name in TABLES:
                _copy(connection, Base.metadata.tables[name], copy)


def _write(connection: Connection, numbers: Iterable[int]) -> None:
    rows: dict[str, list[Row]] = defaultdict(list)
    for number in numbers:
        for name, row in _job(number):
            rows[name].append(row)
    for name in TABLES:
        if rows[name]:
            connection.execute(insert(Base.metadata.tables[name]), rows[name])


def _copy(connection: Connection, table: Table, copy: int) -> None:
    """The first jobs once more, under other ids and at a later time: they come behind the others in each index."""
    at = BEGIN + timedelta(seconds=copy * TEMPLATE)
    columns = [column for column in table.columns if column.computed is None]
    first = next(iter(table.primary_key.columns)) < f"{1:0{_COPY_NUMBER}}"
    copied = select(*[_copied(column, copy, at) for column in columns]).where(first)
    connection.execute(insert(table).from_select([column.name for column in columns], copied))


def _copied(column: Column[Any], copy: int, at: datetime) -> ColumnElement[Any]:
    if column.name in _MARKED:
        return literal(f"{copy:0{_COPY_NUMBER}}") + func.substr(column, _COPY_NUMBER + 1)
    if column.name.endswith("_at"):
        return case((column.is_(None), null()), else_=literal(at, column.type))
    return column


def _job(number: int) -> Iterator[tuple[str, Row]]:
    """The rows of one job, each with its table."""
    state = STATES[number % len(STATES)]
    history = HISTORY[state]
    mark = "0" * _COPY_NUMBER
    job_id = f"{mark}-0000-7000-8000-{number:012}"
    at, user = BEGIN + timedelta(seconds=number), f"{mark}-user-{number // 10}"
    attempt_no = 1 if "locked" in history else 0
    ended, succeeded = state in END_EVENTS, state == "succeeded"
    yield (
        "ai_jobs",
        {
            "id": job_id,
            "root_id": job_id,
            "user_id": user,
            "job_type": "flashcard_generation",
            "target_type": "note",
            "target_id": f"{mark}-note-{number}",
            "queue_name": "ai-background",
            "priority": 50,
            "idempotency_key": f"{mark}-key-{number}",
            "lifecycle_status": state,
            "event_seq": len(history),
            "progress": 100 if succeeded else 0,
            "input_schema_version": "1",
            "output_schema_version": "1",
            "prompt_version": "v1",
            "credential_mode": "platform_key",
            "trigger_type": "user",
            "retry_count": 0,
            "lost_count": 0,
            "max_retry_count": 2,
            "attempt_no": attempt_no,
            "locked_by": "worker-1/token" if state == "running" else None,
            "lock_until": FOR_EVER if state == "running" else None,
            "cancel_requested_at": at if state == "cancelled" else None,
            "validated_output": OUTPUT if succeeded else None,
            "output_hash": "0" * 64 if succeeded else None,
            "artifact_count": 2 if succeeded else 0,
            "error_code": "PROVIDER_TIMEOUT" if state == "failed" else None,
            "created_at": at,
            "started_at": at if attempt_no else None,
            "finished_at": at if ended else None,
        },
    )
    for seq, event_type in enumerate(history, start=1):
        by_worker = seq > 1 and attempt_no > 0
        yield (
            "ai_job_events",
            {
                "job_id": job_id,
                "seq": seq,
                "type": event_type,
                "attempt_no": attempt_no if by_worker else 0,
                "actor": WORKER if by_worker else "user:u",
                "instance": "worker-1" if by_worker else None,
                "at": at,
            },
        )
    if "provider_called" in history:
        yield "ai_usage_logs", _call(job_id, user, at)
    for ordinal in range(2 if succeeded else 0):
        artifact_id = f"{mark}-card-{number}-{ordinal}"
        yield (
            "ai_job_artifacts",
            {"job_id": job_id, "artifact_type": "Flashcard", "artifact_id": artifact_id, "ordinal": ordinal},
        )
    for place, event_type in enumerate(
        (OutboxEventType.ENQUEUE, END_EVENTS[state]) if ended else (OutboxEventType.ENQUEUE,)
    ):
        yield "outbox_events", _event(f"{mark}-{place:04}-7000-8000-{number:012}", job_id, event_type, at)


def _call(job_id: str, user: str, at: datetime) -> Row:
    return {
        "id": job_id,
        "job_id": job_id,
        "attempt_no": 1,
        "call_no": 1,
        "user_id": user,
        "state": "done",
        "provider": "deepseek",
        "model": "deepseek-flash",
        "credential_mode": "platform_key",
        "prompt_tokens": 900,
        "completion_tokens": 400,
        "cached_tokens": 0,
        "estimated": False,
        "cost_micros": 700,
        "currency": "CNY",
        "billed": "yes",
        "latency_ms": 4000,
        "finish_reason": "stop",
        "http_status": 200,
        "started_at": at,
        "finished_at": at,
    }


def _event(event_id: str, job_id: str, event_type: str, at: datetime) -> Row:
    return {
        "id": event_id,
        "event_type": event_type,
        "aggregate_type": "AiJob",
        "aggregate_id": job_id,
        "dedupe_key": f"{event_id[:_COPY_NUMBER]}:{event_type}:{job_id}",
        "payload": {"jobId": job_id},
        "queue_name": "ai-background",
        "status": "published",
        "attempt_count": 0,
        "available_at": at,
        "published_at": at,
        "last_sent_at": at,
        "redrives": 0,
        "message_version": 1,
        "message_key_id": "k1",
        "created_at": at,
    }
