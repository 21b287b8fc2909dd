"""What a new job and a retry have in common: the rows that a job begins with, and its message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock, read_clock
from aijobs.db.database import StatementTooLarge, savepoint
from aijobs.definitions.definition import JobDefinition
from aijobs.errors import ApiError
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.limits import UserLimits
from aijobs.jobs.models import AiJob
from aijobs.jobs.snapshots import SnapshotBuilder
from aijobs.logs import get_logger, job_fields
from aijobs.outbox.repository import OutboxRepository, outgoing
from aijobs.queues.message import HandOver, OutgoingMessage
from aijobs.screening.redaction import Redacted

logger = get_logger(__name__)


@contextmanager
def refused_if_too_large() -> Iterator[None]:
    """`ApiError` PAYLOAD_TOO_LARGE, naming the limit, if the database doesn't take the input in one statement."""
    try:
        yield
    except StatementTooLarge as error:
        raise ApiError("PAYLOAD_TOO_LARGE", {"limit": "maxAllowedPacket", "allowed": error.longest}) from None


@dataclass(frozen=True)
class CreatedJob:
    """A job, and whether this request made it or found it."""

    job: AiJob
    created: bool


def of_today(definition: JobDefinition) -> dict[str, Any]:
    """What a job takes from its definition as it is now."""
    return {
        "job_type": definition.job_type,
        "queue_name": definition.queue.queue_name,
        "max_retry_count": definition.execution.max_retries,
        "input_schema_version": definition.input.schema_version,
        "output_schema_version": definition.output.schema_version,
        "prompt_version": definition.prompt.version if definition.prompt else None,
    }


class JobCreation:
    """Writes new jobs in the transaction of whoever decided that there is to be one."""

    def __init__(
        self,
        clock: Clock,
        lifecycle: LifecycleRepository,
        outbox: OutboxRepository,
        snapshots: SnapshotBuilder,
        limits: UserLimits,
        hand_over: HandOver,
        handover_delay: timedelta,
    ) -> None:
        """`hand_over` sends a new job's message. Its event is due `handover_delay` ahead: the creator sends first, the
        dispatcher what was missed.
        """
        self._clock, self._lifecycle, self._outbox = clock, lifecycle, outbox
        self._snapshots, self._limits = snapshots, limits
        self._hand_over, self._handover_delay = hand_over, handover_delay

    def insert(
        self, session: Session, job: AiJob, definition: JobDefinition, content: Redacted
    ) -> OutgoingMessage | None:
        """Write job, reservation, snapshot, history and event, under the user's row.

        None where a unique constraint says that another was first. `ApiError` TOO_MANY_JOBS or QUOTA_EXCEEDED where
        the user has no room for it; an operator's retry is written all the same.
        """
        job.created_at = read_clock(session, self._clock)
        reserved = self._limits.admit(session, job, definition, content.content)
        try:
            with savepoint(session):
                self._lifecycle.create_job(session, job)
        except IntegrityError:
            return None
        if reserved is not None:
            session.add(reserved)
        session.add(self._snapshots.build(session, job.id, job.input_schema_version, content))
        event = self._outbox.add_enqueue(session, job, job.created_at + self._handover_delay)
        session.flush()
        return outgoing(event, job)

    def announce(self, result: CreatedJob, message: list[OutgoingMessage]) -> None:
        """After the commit: the log's line of a new job, and its message on its way."""
        if not result.created:
            return
        job = result.job
        logger.info("job.created", **job_fields(job, outboxId=message[0].event_id if message else None))
        if message:
            self._hand_over(message[0])
