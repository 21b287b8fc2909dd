"""What an operator may do to the outbox."""

from __future__ import annotations

from sqlalchemy.orm import Session

from aijobs.db.database import Database
from aijobs.errors import ApiError
from aijobs.outbox.models import DEAD, ENQUEUE, OutboxEvent
from aijobs.outbox.repository import OutboxRepository


class OutboxService:
    """Opens the transactions that operators' actions on events need."""

    def __init__(self, database: Database, repository: OutboxRepository) -> None:
        self._database, self._repository = database, repository

    def requeue(self, event_id: str) -> OutboxEvent:
        """Send a dead end event again: pending, with no attempt used.

        `NOT_FOUND` for no such event; `JOB_NOT_RETRYABLE` (409) for an enqueue event, whose job has ended and is
        retried instead, and for an event that isn't dead.
        """

        def requeued(session: Session) -> OutboxEvent:
            event = session.get(OutboxEvent, event_id)
            if event is None:
                raise ApiError("NOT_FOUND")
            if event.event_type == ENQUEUE:
                raise ApiError("JOB_NOT_RETRYABLE", {"reason": "enqueue_event", "jobId": event.aggregate_id})
            if event.status != DEAD or not self._repository.requeue_dead(session, event_id):
                raise ApiError("JOB_NOT_RETRYABLE", {"reason": "not_dead", "status": event.status})
            session.refresh(event)
            return event

        return self._database.write(requeued)
