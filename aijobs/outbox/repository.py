"""Rows of the outbox: written in the transaction of their change, claimed and marked by compare-and-set."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, String, Update, and_, bindparam, cast, exists, literal, null, or_, select, update
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Unit
from aijobs.db.statements import change_by, change_rows, constant, insert_if_absent, read_rows
from aijobs.ids import new_id
from aijobs.logs import LoggedJob
from aijobs.outbox.keys import EnqueuedJob, end_key, enqueue_key
from aijobs.outbox.models import AGGREGATE, OutboxEvent, OutboxEventType, OutboxState, QueuePause
from aijobs.queues.message import MESSAGE_VERSION, JobMessage, OutgoingMessage, digest, microseconds
from aijobs.settings import KeyRing

MAX_ATTEMPTS = 3
"""Maximum claims of an event. A broker that can't be reached uses none."""
RETRY_AFTER = (timedelta(seconds=10), timedelta(seconds=20))
"""The wait after the first and the second failure."""


EVENT_PAUSED: ColumnElement[bool] = exists().where(QueuePause.queue_name == OutboxEvent.queue_name)
"""The event's queue is paused. An event without a queue never is."""
OF_EVENT = bindparam("of_event", type_=OutboxEvent.id.type)
_BY_KEY = select(OutboxEvent.id, OutboxEvent.status).where(OutboxEvent.dedupe_key == bindparam("key"))
_UNSENT = or_(
    OutboxEvent.status == constant(OutboxState.PENDING), OutboxEvent.status == constant(OutboxState.PROCESSING)
)
_PUBLISHED = constant(OutboxState.PUBLISHED)
_THE_UNSENT = and_(OutboxEvent.id == bindparam("of_id"), _UNSENT)


def asks_for(job: Any, attempt: Any = None) -> ColumnElement[bool]:
    """Build the condition that the event `of_event` asks for an attempt of a job, given by its columns: the one that it
    is at, or `attempt`. An event whose key is a digest isn't recognised; its key is.
    """
    number = cast(job.attempt_no if attempt is None else attempt, String)
    return and_(
        OutboxEvent.id == OF_EVENT,
        OutboxEvent.aggregate_id == job.id,
        OutboxEvent.dedupe_key.like(literal("%:") + number),
    )


SENT_FIELDS = ("id", "dedupe_key", "message_version", "message_key_id")
"""The fields of an enqueue event that its message depends on."""


def outgoing(event: OutboxEvent, job: EnqueuedJob) -> OutgoingMessage:
    """Return the broker message of an enqueue event: the same bytes each time."""
    return OutgoingMessage(
        event_id=event.id,
        queue_name=job.queue_name,
        priority=job.priority,
        message_version=event.message_version,
        message_key_id=event.message_key_id,
        message=JobMessage(job.id, job.job_type, digest(event.dedupe_key), microseconds(job.created_at)),
    )


class OutboxRepository:
    """Every statement on `outbox_events`. Each method joins the session it is given."""

    def __init__(self, clock: Clock, message_keys: KeyRing) -> None:
        self._clock = clock
        self._key_id = message_keys.current[0]
        self._due = (OutboxEvent.status == OutboxState.PENDING, OutboxEvent.available_at <= clock.now())

    # --- writing -----------------------------------------------------------------------------------------------

    def ask(self, unit: Unit, job: EnqueuedJob, available_at: datetime | ColumnElement[datetime] | None = None) -> None:
        """Add the event that asks for the job's next attempt, due at `available_at` (now)."""
        insert_if_absent(unit, OutboxEvent, "dedupe_key", **self.enqueue_row(job, available_at))

    def enqueue_row(
        self, job: EnqueuedJob, available_at: datetime | ColumnElement[datetime] | None = None
    ) -> dict[str, Any]:
        """Return the row of that event, with a new id."""
        return {
            "id": new_id(),
            "attempt_count": 0,
            "redrives": 0,
            **self._row(
                OutboxEventType.ENQUEUE,
                job.id,
                enqueue_key(job, job.attempt_no + 1),
                {"jobId": job.id, "jobType": job.job_type, "queueName": job.queue_name, "priority": job.priority},
                queue_name=job.queue_name,
                status=OutboxState.PENDING,
                available_at=self._clock.now() if available_at is None else available_at,
            ),
        }

    def mark_seen(self, job: Any) -> Update:
        """Build the UPDATE that marks the event `of_event` published, if it asks for the attempt that the columns of
        `job` name as begun.
        """
        return (
            update(OutboxEvent)
            .where(asks_for(job), _UNSENT)
            .values(status=_PUBLISHED, published_at=job.locked_at, locked_by=null(), locked_at=null())
        )

    def add_end(self, session: Session, job: LoggedJob, event_type: OutboxEventType) -> None:
        """Add the job's end event, published at once: nothing subscribes yet."""
        now = self._clock.now()
        payload = {"jobId": job.id, "jobType": job.job_type, "lifecycleStatus": job.lifecycle_status}
        key = end_key(event_type, job.id)
        self._insert(
            session, event_type, job.id, key, payload, status=OutboxState.PUBLISHED, available_at=now, published_at=now
        )

    def end_row(self, job: Any) -> dict[str, Any]:
        """Return the row of an end event as expressions of the columns of `job` and of the parameters of
        `end_parameters`.
        """
        columns, now = OutboxEvent.__table__.c, self._clock.now()
        event_id, event_type, key, payload = (
            bindparam(f"end_{name}", type_=columns[name].type) for name in ("id", "event_type", "dedupe_key", "payload")
        )
        row = self._row(
            event_type, job.id, key, payload, status=OutboxState.PUBLISHED, available_at=now, published_at=now
        )
        return {"id": event_id, "attempt_count": 0, "redrives": 0, **row}

    def end_parameters(self, job: LoggedJob, status: str, event_type: OutboxEventType) -> dict[str, Any]:
        """Return the parameters of `end_row` for a job that ends in a state."""
        payload = {"jobId": job.id, "jobType": job.job_type, "lifecycleStatus": status}
        return {
            "end_id": new_id(),
            "end_event_type": event_type,
            "end_dedupe_key": end_key(event_type, job.id),
            "end_payload": payload,
        }

    def _insert(self, unit: Unit, *row: Any, **values: Any) -> None:
        insert_if_absent(unit, OutboxEvent, "dedupe_key", **self._row(*row, **values))

    def _row(self, event_type: Any, aggregate_id: Any, dedupe_key: Any, payload: Any, **values: Any) -> dict[str, Any]:
        return {
            "event_type": event_type,
            "aggregate_type": AGGREGATE,
            "aggregate_id": aggregate_id,
            "dedupe_key": dedupe_key,
            "payload": payload,
            "created_at": self._clock.now(),
            **self._of_today(),
            **values,
        }

    def mark_asking_published(
        self, unit: Unit, job: EnqueuedJob, attempt: int, at: datetime | ColumnElement[datetime] | None
    ) -> str | None:
        """Mark the event that asks for `attempt` published at `at`, and return its id; None if there is no such event.

        `at` is None if the message isn't needed any more. An event that is marked already is left alone, because an
        UPDATE costs more than a read.
        """
        event = read_rows(unit, _BY_KEY, {"key": enqueue_key(job, attempt)}).one_or_none()
        if event is None:
            return None
        if event.status in (OutboxState.PENDING, OutboxState.PROCESSING):
            values = {"status": OutboxState.PUBLISHED, "published_at": at, "locked_by": None, "locked_at": None}
            change_by(unit, OutboxEvent, _THE_UNSENT, of={"of_id": event.id}, **values)
        event_id: str = event.id
        return event_id

    # --- claiming ----------------------------------------------------------------------------------------------

    def find_dispatchable(
        self, session: Session, limit: int, *, tried: bool, skip: int = 0, without: Collection[str] = ()
    ) -> list[str]:
        """Return ids of due pending events, oldest first, without the first `skip` and those of the queues `without`.

        `tried` selects those that have used an attempt, otherwise those that have used none. Events are chosen by state
        and never by the last id seen, because transactions commit out of order. Events of a paused queue are left out.
        """
        wanted = [OutboxEvent.attempt_count > 0 if tried else OutboxEvent.attempt_count == 0]
        if without:
            wanted.append(or_(OutboxEvent.queue_name.is_(None), OutboxEvent.queue_name.not_in(without)))
        found = session.execute(
            select(OutboxEvent.id)
            .where(*self._due, ~EVENT_PAUSED, *wanted)
            .order_by(OutboxEvent.available_at, OutboxEvent.id)
            .limit(limit)
            .offset(skip)
        )
        return list(found.scalars())

    def claim(self, session: Session, event_ids: Collection[str], holder: str) -> list[OutboxEvent]:
        """Claim those of the events that are still dispatchable. `holder` is used for this claim alone.

        A claim counts as an attempt, so that an event can't kill dispatchers for ever.
        """
        # Check the state again: meanwhile another dispatcher may have put an event back, or its queue was paused. Skip
        # rows that another dispatcher is claiming: no waiting, no deadlock. SQLite has one writer and ignores this.
        # Without the hint MariaDB walks a small table by another index, and locks all of it.
        free = session.execute(
            select(OutboxEvent.id)
            .with_hint(OutboxEvent, "FORCE INDEX (PRIMARY)", "mysql")
            .with_hint(OutboxEvent, "FORCE INDEX (PRIMARY)", "mariadb")
            .where(OutboxEvent.id.in_(event_ids), *self._due, ~EVENT_PAUSED)
            .order_by(OutboxEvent.id)
            .with_for_update(skip_locked=True)
        ).scalars()
        change_rows(
            session,
            update(OutboxEvent)
            .where(OutboxEvent.id.in_(list(free)), *self._due)
            .values(
                status=OutboxState.PROCESSING,
                locked_by=holder,
                locked_at=self._clock.now(),
                attempt_count=OutboxEvent.attempt_count + 1,
            ),
        )
        claimed = session.execute(
            select(OutboxEvent)
            .where(
                OutboxEvent.id.in_(event_ids),
                OutboxEvent.status == OutboxState.PROCESSING,
                OutboxEvent.locked_by == holder,
            )
            .order_by(OutboxEvent.available_at, OutboxEvent.id)
        )
        return list(claimed.scalars())

    def enqueue_event(self, session: Session, job: EnqueuedJob) -> OutboxEvent | None:
        """Return the event that asks for the job's next attempt; None if there is none."""
        key = enqueue_key(job, job.attempt_no + 1)
        return session.execute(select(OutboxEvent).where(OutboxEvent.dedupe_key == key)).scalar()

    def find_expired_claims(
        self, session: Session, ttl: timedelta, limit: int, after: tuple[datetime, str] | None = None
    ) -> list[OutboxEvent]:
        """Return claims older than `ttl`, oldest first. `after`: (`locked_at`, id) of the page before's last one."""
        query = select(OutboxEvent).where(
            OutboxEvent.status == OutboxState.PROCESSING, OutboxEvent.locked_at <= self._clock.now(-ttl)
        )
        if after is not None:
            at, event_id = after
            later = and_(OutboxEvent.locked_at == at, OutboxEvent.id > event_id)
            query = query.where(or_(OutboxEvent.locked_at > at, later))
        found = session.execute(query.order_by(OutboxEvent.locked_at, OutboxEvent.id).limit(limit))
        return list(found.scalars())

    # --- marking: each names the claim it belongs to, so that a late dispatcher changes nothing -----------------

    def mark_published(
        self, session: Session, event_ids: Collection[str], holder: str, *, sent: bool, last_error: str | None = None
    ) -> int:
        """Mark claimed events published, and return how many were still claimed. `sent`: they went to the broker."""
        values: dict[str, Any] = {
            "status": OutboxState.PUBLISHED,
            "published_at": self._clock.now(),
            "last_error": last_error,
        }
        if sent:
            values["last_sent_at"] = self._clock.now()
        return self._mark(session, event_ids, holder, values)

    def mark_failed(self, session: Session, event: OutboxEvent, holder: str, error: str) -> int:
        """Put a claimed event that failed back for later. It must have attempts left.

        It gets today's key and version, because it may have failed for a key that is gone.
        """
        wait = RETRY_AFTER[min(event.attempt_count, len(RETRY_AFTER)) - 1]
        values = {
            "status": OutboxState.PENDING,
            "available_at": self._clock.now(wait),
            "last_error": error[:300],
            **self._of_today(),
        }
        return self._mark(session, [event.id], holder, values)

    def sign_anew(self, session: Session, event: OutboxEvent) -> None:
        """Give today's key and version to a published event that can't be sent any more."""
        change_rows(
            session,
            update(OutboxEvent)
            .where(OutboxEvent.id == event.id, OutboxEvent.message_key_id == event.message_key_id)
            .values(last_sent_at=None, **self._of_today()),
        )

    def _of_today(self) -> dict[str, Any]:
        return {"message_version": MESSAGE_VERSION, "message_key_id": self._key_id}

    def mark_dead(self, session: Session, event: OutboxEvent, holder: str, error: str) -> int:
        """End a claimed event that has no attempts left."""
        return self._mark(session, [event.id], holder, {"status": OutboxState.DEAD, "last_error": error[:300]})

    def release_claims(self, session: Session, event_ids: Collection[str], holder: str, *, counted: bool) -> int:
        """Make claimed events due again at once. Unless `counted`, the attempt doesn't count."""
        values: dict[str, Any] = {"status": OutboxState.PENDING}
        if not counted:
            values["attempt_count"] = OutboxEvent.attempt_count - 1
        return self._mark(session, event_ids, holder, values)

    def _mark(self, session: Session, event_ids: Collection[str], holder: str, values: dict[str, Any]) -> int:
        return change_rows(
            session,
            update(OutboxEvent)
            .where(
                OutboxEvent.id.in_(event_ids),
                OutboxEvent.status == OutboxState.PROCESSING,
                OutboxEvent.locked_by == holder,
            )
            .values(locked_by=None, locked_at=None, **values),
        )

    def count_redrive(self, session: Session, event: OutboxEvent) -> bool:
        """Record that a published event is sent again. False if another process did so since it was read."""
        changed = change_rows(
            session,
            update(OutboxEvent)
            .where(
                OutboxEvent.id == event.id,
                OutboxEvent.status == OutboxState.PUBLISHED,
                OutboxEvent.redrives == event.redrives,
            )
            .values(redrives=OutboxEvent.redrives + 1, last_sent_at=self._clock.now()),
        )
        return changed == 1

    def requeue_dead(self, session: Session, event_id: str) -> bool:
        """Make a dead event pending again with no attempt used. False if it isn't dead."""
        changed = change_rows(
            session,
            update(OutboxEvent)
            .where(OutboxEvent.id == event_id, OutboxEvent.status == OutboxState.DEAD)
            .values(
                status=OutboxState.PENDING,
                attempt_count=0,
                available_at=self._clock.now(),
                locked_by=None,
                locked_at=None,
            ),
        )
        return changed == 1
