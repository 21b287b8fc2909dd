"""Explain why a job that hasn't ended waits or runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from aijobs.ai.calling.breaker import BreakerState
from aijobs.jobs.history import HistoryType
from aijobs.jobs.status import Phase
from aijobs.monitor.views import JobDetail, OutboxRow, QueueStatus, Wait
from aijobs.outbox.models import OutboxEventType, OutboxState
from aijobs.queues.state import AWAY, OK


def enqueue_event(detail: JobDetail) -> OutboxRow | None:
    """Return the event that asks for the job's current or next attempt."""
    return next((event for event in reversed(detail.outbox) if event.event_type == OutboxEventType.ENQUEUE), None)


def due_at(detail: JobDetail) -> datetime:
    """Return the job's due time."""
    return detail.job.next_attempt_at or detail.job.created_at


def lease_expired(detail: JobDetail, grace: timedelta) -> bool:
    """Return whether the lease has expired, grace included."""
    until = detail.job.lock_until
    return detail.job.locked_by is not None and until is not None and until + grace < detail.read_at


def was_postponed(detail: JobDetail) -> bool:
    """Return whether the job was postponed because no provider was available."""
    return bool(detail.history) and detail.history[-1].type == HistoryType.POSTPONED


def find_wait(
    detail: JobDetail, queue: QueueStatus | None, breakers: Sequence[BreakerState], lease_grace: timedelta
) -> Wait | None:
    """Return the reason for the wait; None for a job that has ended.

    `queue`: the job's queue. `breakers`: those that block its calls. Both matter for a job that nobody holds.
    """
    job = detail.job
    if job.final:
        return None
    if lease_expired(detail, lease_grace):
        return Wait("lease_expired")
    if job.phase == Phase.CANCEL_REQUESTED:
        return Wait("cancelling")
    if job.locked_by is not None:
        return Wait("running")
    until = due_at(detail) if due_at(detail) > detail.read_at else None
    if queue is not None and queue.paused is not None:
        return Wait("paused", until)
    if until is not None and was_postponed(detail):
        return Wait("breaker_open", until, tuple(breakers)) if breakers else Wait("providers_busy", until)
    if until is not None:
        return Wait("not_due", until)
    if queue is not None and queue.broker != OK:
        return Wait("broker_away" if queue.broker == AWAY else "broker_refuses", cause=queue.broker_cause)
    return Wait(_delivery(detail, queue))


def _delivery(detail: JobDetail, queue: QueueStatus | None) -> str:
    """Return how far the message of a due job has come."""
    if queue is not None and queue.workers == 0:
        return "no_worker"
    event = enqueue_event(detail)
    if event is None or (event.status != OutboxState.PUBLISHED and event.last_sent_at is None):
        return "not_sent"
    return "in_line"
