"""The five states, the transitions between them, and the phases that are derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from aijobs.outbox.models import OutboxEventType


class JobState(StrEnum):
    """The states in `ai_jobs.lifecycle_status`. The WHERE of each UPDATE refuses all transitions but five."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
OPEN = (JobState.QUEUED, JobState.RUNNING)

STATUS_TO_LIFECYCLE = {
    "pending": JobState.QUEUED,
    "processing": JobState.RUNNING,
    "completed": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
    "cancel_requested": JobState.CANCELLED,
}
"""The legacy names in `ai_jobs.status`, and the state of each."""

END_EVENTS: Mapping[str, OutboxEventType] = {
    JobState.SUCCEEDED: OutboxEventType.COMPLETED,
    JobState.FAILED: OutboxEventType.FAILED,
    JobState.CANCELLED: OutboxEventType.CANCELLED,
}
"""The end event of each final state."""


class Phase(StrEnum):
    """A finer word than the state, for people."""

    CREATED = "created"
    QUEUED = "queued"
    RUNNING = "running"
    RETRYING = "retrying"
    CANCEL_REQUESTED = "cancel_requested"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class HasPhase(Protocol):
    """The columns that a phase is derived from."""

    lifecycle_status: str
    locked_by: str | None
    cancel_requested_at: datetime | None


def phase(job: HasPhase, published: bool) -> str:
    """Return the job's phase, a value of `Phase`. It is never stored.

    `published`: the job's first enqueue event is marked published. Until then a queued job is `created`.
    """
    if job.lifecycle_status in FINAL:
        return job.lifecycle_status
    if job.cancel_requested_at is not None:
        return Phase.CANCEL_REQUESTED
    if job.lifecycle_status == JobState.QUEUED:
        return Phase.QUEUED if published else Phase.CREATED
    return Phase.RUNNING if job.locked_by else Phase.RETRYING
