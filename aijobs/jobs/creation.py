"""Create a job once: find it, or insert its rows in one transaction, and hand its message over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Base, Database, StatementTooLarge, session_on
from aijobs.definitions.definition import JobDefinition
from aijobs.errors import ApiError
from aijobs.ids import new_id
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.limits import UserLimits
from aijobs.jobs.models import AiJob, AiJobSnapshot, QuotaReservation
from aijobs.jobs.requests import CreatedJob
from aijobs.jobs.snapshots import SnapshotBuilder
from aijobs.jobs.users import ensure_user_row, lock_user_row
from aijobs.logs import get_logger, job_fields
from aijobs.outbox.models import OutboxEvent
from aijobs.outbox.repository import SENT_FIELDS, OutboxRepository, outgoing
from aijobs.queues.message import HandOver
from aijobs.screening.redaction import Redacted

logger = get_logger(__name__)


@dataclass(frozen=True)
class NewJob:
    """The columns of a job to be inserted, the definition that it runs by, and its redacted input."""

    columns: Mapping[str, Any]
    definition: JobDefinition
    content: Redacted


class _NoUserRow(Exception):
    """The user has no row to lock yet: it is their first job."""


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
        self, user_id: str, find: Callable[[Connection], AiJob | None], prepare: Callable[[Connection, str], NewJob]
    ) -> CreatedJob:
        """Return the job that `find` finds, otherwise insert the one that `prepare(connection, id)` makes. Both run
        under the lock of the user's row.

        Job, reservation, snapshot, history and event are written in one transaction; then the message is handed over.
        `ApiError` TOO_MANY_JOBS or QUOTA_EXCEEDED if the user has no room for it, which an operator's retry ignores;
        PAYLOAD_TOO_LARGE, naming the limit, if the database refuses the input because of its size.
        """
        job_id = new_id()

        def found(session: Session, job: AiJob) -> CreatedJob:
            event = self._outbox.enqueue_event(session, job)  # An earlier try of this transaction was committed.
            return CreatedJob(job, True, outgoing(event, job) if event else None)

        def create(connection: Connection) -> CreatedJob:
            if not lock_user_row(connection, user_id):
                raise _NoUserRow
            existing = find(connection)
            if existing is None:
                return self._insert(connection, prepare(connection, job_id))
            if existing.id != job_id:
                return CreatedJob(existing, created=False)
            with session_on(connection) as session:
                return found(session, existing)

        def confirm(session: Session) -> CreatedJob | None:
            job = session.get(AiJob, job_id)
            return found(session, job) if job else None

        result = self._write(user_id, create, confirm)
        if result.created:
            event_id = result.message.event_id if result.message else None
            logger.info("job.created", **job_fields(result.job, outboxId=event_id))
        if result.message is not None:
            self._hand_over(result.message)
        return result

    def _write(
        self,
        user_id: str,
        create: Callable[[Connection], CreatedJob],
        confirm: Callable[[Session], CreatedJob | None],
    ) -> CreatedJob:
        for _ in range(3):
            try:
                return self._database.transact(create, confirm)
            except _NoUserRow:
                ensure_user_row(self._database, self._clock, user_id)
            except StatementTooLarge as error:
                raise ApiError("PAYLOAD_TOO_LARGE", {"limit": "maxAllowedPacket", "allowed": error.longest}) from None
            except IntegrityError:
                continue  # Another request with this key was first, and is found now.
        raise ApiError("SERVICE_BUSY")

    def _insert(self, connection: Connection, new: NewJob) -> CreatedJob:
        columns = new.columns
        reserved = self._limits.admit(connection, columns, new.definition, new.content.content)
        # Its queue, its priority and the parts of its dedupe key.
        event = self._outbox.enqueue_row(AiJob(**{**columns, "attempt_no": 0}), self._clock.now(self._handover_delay))
        snapshot = self._snapshots.build(columns["id"], columns["input_schema_version"], new.content)
        rows: list[tuple[type[Base], Mapping[str, Any]]] = [(AiJobSnapshot, snapshot), (OutboxEvent, event)]
        if reserved is not None:
            rows.append((QuotaReservation, reserved))
        job = self._lifecycle.create_job(connection, columns, *rows)
        return CreatedJob(job, True, outgoing(OutboxEvent(**{name: event[name] for name in SENT_FIELDS}), job))
