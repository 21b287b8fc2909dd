"""Why a job that has not ended is where it is: one key of `explanations.WAITS`."""

from __future__ import annotations

from datetime import datetime, timedelta

from aijobs.monitor.views import JobDetail, OutboxRow, QueueStatus
from aijobs.outbox.models import ENQUEUE, PUBLISHED


def enqueue_event(detail: JobDetail) -> OutboxRow | None:
    """The event that asks for the job's present or next attempt."""
    return next((event for event in reversed(detail.outbox) if event.event_type == ENQUEUE), None)


def due_at(detail: JobDetail) -> datetime:
    """When the job may be taken: its due time."""
    return detail.job.next_attempt_at or detail.job.created_at


def lease_expired(detail: JobDetail, grace: timedelta) -> bool:
    """Whether the holder's lease has run out, grace included."""
    until = detail.job.lock_until
    return detail.job.locked_by is not None and until is not None and until + grace < detail.read_at


def find_wait(detail: JobDetail, queue: QueueStatus | None, lease_grace: timedelta) -> str | None:
    """The reason for the wait; None for a job that has ended."""
    job = detail.job
    if job.final:
        return None
    if lease_expired(detail, lease_grace):
        return "lease_expired"
    if job.phase == "cancel_requested":
        return "cancelling"
    if job.locked_by is not None:
        return "running"
    if queue is not None and queue.paused is not None:
        return "paused"
    if due_at(detail) > detail.read_at:
        return "not_due"
    if queue is not None and queue.broker_depth is None:
        return "broker_away"
    event = enqueue_event(detail)
    if queue is not None and queue.workers == 0:
        return "no_worker"
    if event is None or (event.status != PUBLISHED and event.last_sent_at is None):
        return "not_sent"
    return "in_line"
