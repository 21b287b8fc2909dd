"""The broker's message: four fields, signed, and the same bytes each time it is made.

A member of a queue's sorted set is a pure function of the outbox row (event id, message version and key id) and the
job it speaks of, so that a second send is no second message, and what was sent can be found and removed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

MESSAGE_VERSION = 1
PUT_BACK = "put_back"
"""What a crew answers that could not look at a message's job at all: the message is to wait where it was."""


@dataclass(frozen=True)
class JobMessage:
    """What a message says, in four fields: which job, of what type, and by which event (`idempotency_key`)."""

    job_id: str
    job_type: str
    idempotency_key: str
    """SHA-256 of the event's dedupe key, so that no user id is in the broker."""
    created_at: str
    """The job's, as ISO 8601."""
    event_id: str | None = field(default=None, compare=False)
    """Of the event, where the message's name tells it, which is no field: a hint that spares looking for the event."""


@dataclass(frozen=True)
class OutgoingMessage:
    """An outbox row on its way to its queue."""

    event_id: str
    queue_name: str
    priority: int
    """0 is the highest … 100."""
    message_version: int
    message_key_id: str
    message: JobMessage


HandOver = Callable[[OutgoingMessage], None]
"""What a process does with a message of its own after the commit; it doesn't raise."""


def digest(dedupe_key: str) -> str:
    """The message's idempotency key for an event's dedupe key."""
    return hashlib.sha256(dedupe_key.encode()).hexdigest()


def microseconds(at: datetime) -> str:
    """`at` in the one spelling that messages carry."""
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")
