"""The outbox: events written in the transaction of the change that they announce."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Index, Integer, SmallInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from aijobs.db.database import TABLE_OPTIONS, Base, Json, Key, UtcDateTime
from aijobs.ids import new_id


class OutboxEventType(StrEnum):
    """What an event announces: an attempt is due, or the job ended."""

    ENQUEUE = "ai.job.enqueue"
    COMPLETED = "ai.job.completed"
    FAILED = "ai.job.failed"
    CANCELLED = "ai.job.cancelled"


class OutboxState(StrEnum):
    """The states in `outbox_events.status`."""

    PENDING = "pending"
    PROCESSING = "processing"
    PUBLISHED = "published"
    DEAD = "dead"


AGGREGATE = "AiJob"


class OutboxEvent(Base):
    """One event and its state. Claimed by compare-and-set, sent, then marked published."""

    __tablename__ = "outbox_events"

    id: Mapped[str] = mapped_column(Key(36), primary_key=True, default=new_id)
    event_type: Mapped[str] = mapped_column(Key(64))
    aggregate_type: Mapped[str] = mapped_column(String(32))
    aggregate_id: Mapped[str] = mapped_column(Key(36))
    dedupe_key: Mapped[str] = mapped_column(Key(700), unique=True)
    payload: Mapped[Any] = mapped_column(Json, nullable=False)
    queue_name: Mapped[str | None] = mapped_column(Key(32))
    """The queue of an enqueue event, copied from its payload so that a paused queue's events can be left out."""
    status: Mapped[str] = mapped_column(Key(16))
    attempt_count: Mapped[int] = mapped_column(SmallInteger, default=0)
    available_at: Mapped[datetime] = mapped_column(UtcDateTime)
    locked_by: Mapped[str | None] = mapped_column(Key(255))
    locked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    published_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_sent_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    redrives: Mapped[int] = mapped_column(Integer, default=0)
    message_version: Mapped[int] = mapped_column(SmallInteger)
    message_key_id: Mapped[str] = mapped_column(String(16))
    last_error: Mapped[str | None] = mapped_column(String(300))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (
        Index("ix_outbox_events_due", "status", "available_at", "id"),
        Index("ix_outbox_events_claims", "status", "locked_at", "id"),
        Index("ix_outbox_events_job", "aggregate_id", "event_type", "id"),
        Index("ix_outbox_events_errors", "last_error", "id"),
        TABLE_OPTIONS,
    )


class QueuePause(Base):
    """A paused queue: no job of it is locked or dispatched."""

    __tablename__ = "queue_pauses"

    queue_name: Mapped[str] = mapped_column(Key(32), primary_key=True)
    reason: Mapped[str] = mapped_column(String(500))
    paused_by: Mapped[str] = mapped_column(String(300))
    paused_at: Mapped[datetime] = mapped_column(UtcDateTime)
