"""Operators' actions on the outbox."""

from __future__ import annotations

from sqlalchemy.orm import Session

from aijobs.db.database import Database
from aijobs.errors import ApiError
from aijobs.outbox.models import OutboxEvent, OutboxEventType, OutboxState
from aijobs.outbox.repository import OutboxRepository


class OutboxService:
    """Runs operators' actions on events in transactions."""

    def __init__(self, database: Database, repository: OutboxRepository) -> None:
        self._database, self._repository = database, repository

    def requeue(self, event_id: str) -> OutboxEvent:
        """Make a dead end event pending again, with no attempt used.

        `NOT_FOUND` if there is no such event. `JOB_NOT_RETRYABLE` (409) for an event that isn't dead, and for an
        enqueue event: its job has ended and can be retried instead.
        """

        def requeued(session: Session) -> OutboxEvent:
            event = session.get(OutboxEvent, event_id)
            if event is None:
                raise ApiError("NOT_FOUND")
            if event.event_type == OutboxEventType.ENQUEUE:
                raise ApiError("JOB_NOT_RETRYABLE", {"reason": "enqueue_event", "jobId": event.aggregate_id})
            if event.status != OutboxState.DEAD or not self._repository.requeue_dead(session, event_id):
                raise ApiError("JOB_NOT_RETRYABLE", {"reason": "not_dead", "status": event.status})
            session.refresh(event)
            return event

        return self._database.write(requeued)
