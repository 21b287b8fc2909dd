"""Dedupe keys: one per event, escaped so that different events never share one."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Protocol

MAX_LENGTH = 700


class KeyedJob(Protocol):
    """The fields that a job's dedupe keys are made of."""

    id: str
    job_type: str
    user_id: str
    idempotency_key: str | None


class EnqueuedJob(KeyedJob, Protocol):
    """The fields of a job that its enqueue event and its broker message copy."""

    queue_name: str
    priority: int
    attempt_no: int
    created_at: datetime


def _escaped(part: str) -> str:
    return part.replace("%", "%25").replace(":", "%3A")


def enqueue_key(job: KeyedJob, attempt: int) -> str:
    """Return `{jobType}:{userId}:{k=idempotencyKey or j=jobId}:{attempt}`, each part escaped.

    `attempt` is the one that the event asks for. A key of over 700 characters becomes `sha256:` and its digest.
    """
    name = f"j={job.id}" if job.idempotency_key is None else f"k={job.idempotency_key}"
    key = ":".join((_escaped(job.job_type), _escaped(job.user_id), _escaped(name), str(attempt)))
    return key if len(key) <= MAX_LENGTH else f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def end_key(event_type: str, job_id: str) -> str:
    """Return `{eventType}:{jobId}`: a job ends once."""
    return f"{event_type}:{job_id}"
