"""Create a job once: find it, or insert its rows in one transaction, and hand its message over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock, read_clock
from aijobs.db.database import Database, StatementTooLarge, savepoint
from aijobs.definitions.definition import JobDefinition
from aijobs.errors import ApiError
from aijobs.ids import new_id
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.limits import UserLimits
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreatedJob
from aijobs.jobs.snapshots import SnapshotBuilder
from aijobs.jobs.users import ensure_user_row, lock_user_row
from aijobs.logs import get_logger, job_fields
from aijobs.outbox.repository import OutboxRepository, outgoing
from aijobs.queues.message import HandOver
from aijobs.screening.redaction import Redacted

logger = get_logger(__name__)


@dataclass(frozen=True)
class NewJob:
    """A job to be inserted, the definition that it runs by, and its redacted input."""

    job: AiJob
    definition: JobDefinition
    content: Redacted


def definition_columns(definition: JobDefinition) -> dict[str, Any]:
    """Return the columns that a new job takes from its definition."""
    return {
        "job_type": definition.job_type,
        "queue_name": definition.queue.queue_name,
        "max_retry_count": definition.execution.max_retries,
        "input_schema_version": definition.input.schema_version,
        "output_schema_version": definition.output.schema_version,
        "prompt_version": definition.prompt.version if definition.prompt else None,
    }


class JobCreation:
    """Creates a job once: for a user's request, and for an operator's retry."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        lifecycle: LifecycleRepository,
        outbox: OutboxRepository,
        snapshots: SnapshotBuilder,
        limits: UserLimits,
        *,
        hand_over: HandOver,
        handover_delay: timedelta,
    ) -> None:
        """`hand_over` sends a new job's message. Its event is due after `handover_delay`: the creator sends first, and
        the dispatcher sends what the creator could not.
        """
        self._database, self._clock, self._lifecycle, self._outbox = database, clock, lifecycle, outbox
        self._snapshots, self._limits = snapshots, limits
        self._hand_over, self._handover_delay = hand_over, handover_delay

    def create_once(
        self, user_id: str, find: Callable[[Session], AiJob | None], prepare: Callable[[Session, str], NewJob]
    ) -> CreatedJob:
        """Return the job that `find` finds, otherwise insert the one that `prepare(session, id)` makes. Both run under
        the lock of the user's row.

        Job, reservation, snapshot, history and event are written in one transaction; then the message is handed over.
        `ApiError` TOO_MANY_JOBS or QUOTA_EXCEEDED if the user has no room for it, which an operator's retry ignores;
        PAYLOAD_TOO_LARGE, naming the limit, if the database refuses the input because of its size.
        """
        job_id = new_id()

        def found(session: Session, job: AiJob) -> CreatedJob:
            if job.id != job_id:
                return CreatedJob(job, created=False)
            event = self._outbox.enqueue_event(session, job)  # An earlier try of this transaction was committed.
            return CreatedJob(job, True, outgoing(event, job) if event else None)

        def create(session: Session) -> CreatedJob:
            lock_user_row(session, user_id)
            existing = find(session)
            if existing is None:
                inserted = self._insert(session, prepare(session, job_id))
                if inserted is not None:
                    return inserted
                existing = find(session)  # A unique conflict: another request with this key was first.
                if existing is None:
                    raise ApiError("SERVICE_BUSY")
            return found(session, existing)

        def confirm(session: Session) -> CreatedJob | None:
            job = session.get(AiJob, job_id)
            return found(session, job) if job else None

        ensure_user_row(self._database, self._clock, user_id)
        try:
            result = self._database.write(create, confirm)
        except StatementTooLarge as error:
            raise ApiError("PAYLOAD_TOO_LARGE", {"limit": "maxAllowedPacket", "allowed": error.longest}) from None
        if result.created:
            event_id = result.message.event_id if result.message else None
            logger.info("job.created", **job_fields(result.job, outboxId=event_id))
        if result.message is not None:
            self._hand_over(result.message)
        return result

    def _insert(self, session: Session, new: NewJob) -> CreatedJob | None:
        """Insert the job's rows; None if a unique constraint refuses it."""
        job = new.job
        job.created_at = read_clock(session, self._clock)
        reserved = self._limits.admit(session, job, new.definition, new.content.content)
        try:
            with savepoint(session):
                self._lifecycle.create_job(session, job)
        except IntegrityError:
            return None
        if reserved is not None:
            session.add(reserved)
        session.add(self._snapshots.build(session, job.id, job.input_schema_version, new.content))
        event = self._outbox.add_enqueue(session, job, job.created_at + self._handover_delay)
        session.flush()
        return CreatedJob(job, True, outgoing(event, job))
