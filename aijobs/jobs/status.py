"""The five states, the transitions between them, and the phases that are derived from them."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

QUEUED = "queued"
RUNNING = "running"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"

LIFECYCLE_STATUSES = (QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED)
FINAL = frozenset({SUCCEEDED, FAILED, CANCELLED})
OPEN = (QUEUED, RUNNING)

TRANSITIONS = {
    QUEUED: frozenset({RUNNING, CANCELLED}),
    RUNNING: frozenset({SUCCEEDED, FAILED, CANCELLED}),
    SUCCEEDED: frozenset[str](),
    FAILED: frozenset[str](),
    CANCELLED: frozenset[str](),
}
"""The allowed transitions. The WHERE of each UPDATE refuses all others."""

STATUS_TO_LIFECYCLE = {
    "pending": QUEUED,
    "processing": RUNNING,
    "completed": SUCCEEDED,
    "failed": FAILED,
    "cancelled": CANCELLED,
    "cancel_requested": CANCELLED,
}
"""The legacy names in `ai_jobs.status`, and the state of each."""

PHASES = ("created", "queued", "running", "retrying", "cancel_requested", SUCCEEDED, FAILED, CANCELLED)


class HasPhase(Protocol):
    """The columns that a phase is derived from."""

    lifecycle_status: str
    locked_by: str | None
    cancel_requested_at: datetime | None


def phase(job: HasPhase, published: bool) -> str:
    """Return the job's phase, one of `PHASES`. It is never stored.

    `published`: the job's first enqueue event is marked published. Until then a queued job is `created`.
    """
    if job.lifecycle_status in FINAL:
        return job.lifecycle_status
    if job.cancel_requested_at is not None:
        return "cancel_requested"
    if job.lifecycle_status == QUEUED:
        return "queued" if published else "created"
    return "running" if job.locked_by else "retrying"
