"""Messages as the outbox creates them, for tests of the queues."""

from __future__ import annotations

from typing import Any

from aijobs.ids import new_id
from aijobs.queues.message import MESSAGE_VERSION, JobMessage, OutgoingMessage, digest
from aijobs.settings import KeyRing

SECRET = "0" * 32
KEYS = KeyRing.parse(f"k1:{SECRET}", "test")


def outgoing(**changes: Any) -> OutgoingMessage:
    """Return a message for `ai-interactive` of a new event and job; `changes` are fields of the message or its job."""
    job_id = changes.pop("job_id", None) or new_id()
    message = JobMessage(
        job_id=job_id,
        job_type=changes.pop("job_type", "synthetic"),
        idempotency_key=digest(f"synthetic:u:j={job_id}:1"),
        created_at="2026-01-31T08:00:00.000001Z",
    )
    fields: dict[str, Any] = {
        "event_id": new_id(),
        "queue_name": "ai-interactive",
        "priority": 50,
        "message_version": MESSAGE_VERSION,
        "message_key_id": "k1",
        "message": message,
    }
    return OutgoingMessage(**{**fields, **changes})
