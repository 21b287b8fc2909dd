"""The five states, the moves between them, and the words that are derived from them."""

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
"""What each state may become; everything else is refused, also by the WHERE of each UPDATE."""

STATUS_TO_LIFECYCLE = {
    "pending": QUEUED,
    "processing": RUNNING,
    "completed": SUCCEEDED,
    "failed": FAILED,
    "cancelled": CANCELLED,
    "cancel_requested": CANCELLED,
}
"""The legacy names that `ai_jobs.status` shadows, and what each stands for."""

PHASES = ("created", "queued", "running", "retrying", "cancel_requested", SUCCEEDED, FAILED, CANCELLED)


class HasPhase(Protocol):
    """What a phase is derived from."""

    lifecycle_status: str
    locked_by: str | None
    cancel_requested_at: datetime | None


def phase(job: HasPhase, published: bool) -> str:
    """The finer word for where a job is: one of `PHASES`, never stored.

    `published` says whether the job's first enqueue event reached the broker by the dispatcher's word, or the job
    was locked without it: until then a queued job is `created`.
    """
    if job.lifecycle_status in FINAL:
        return job.lifecycle_status
    if job.cancel_requested_at is not None:
        return "cancel_requested"
    if job.lifecycle_status == QUEUED:
        return "queued" if published else "created"
    return "running" if job.locked_by else "retrying"
