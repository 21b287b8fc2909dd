"""The broker's message: four fields, signed, and the same bytes each time.

A member of a queue's sorted set depends only on the outbox row (event id, message version and key id) and its job. So a
second send adds no second message, and a sent message can be found and removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

MESSAGE_VERSION = 1
PUT_BACK = "put_back"
"""The outcome of a message whose job couldn't be looked at: the message goes back to its queue."""


@dataclass(frozen=True)
class JobMessage:
    """The four fields of a message: the job, its type, the event (`idempotency_key`) and the job's creation."""

    job_id: str
    job_type: str
    idempotency_key: str
    """SHA-256 of the event's dedupe key, so that no user id is in the broker."""
    created_at: str
    """Creation time of the job in ISO 8601."""
    event_id: str | None = field(default=None, compare=False)
    """Id of the event, if the message's name has it. It is no field, and saves a query for the event."""


@dataclass(frozen=True)
class OutgoingMessage:
    """An outbox row on its way to its queue."""

    event_id: str
    queue_name: str
    priority: int
    """0 (highest) to 100."""
    message_version: int
    message_key_id: str
    message: JobMessage


HandOver = Callable[[OutgoingMessage], None]
"""Sends a message of this process after the commit. Doesn't raise."""


def digest(dedupe_key: str) -> str:
    """Return the message's idempotency key for an event's dedupe key."""
    return hashlib.sha256(dedupe_key.encode()).hexdigest()


def microseconds(at: datetime) -> str:
    """Return `at` in the format of messages."""
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")
