"""Encode and decode broker messages: signed JSON, never pickle.

A member of a queue's sorted set is the first eight bytes of the event's UUIDv7 and then one JSON object:

    {"id":"aj-<event id>","v":1,"task":"run_job","args":[{jobId, jobType, idempotencyKey, createdAt}],
     "key":"<key id>","sig":"<HMAC-SHA256, hex>"}

Huey cuts off the eight bytes when it pops. The id comes first in the JSON, so that members of one priority sort by the
time of their events. The signature covers everything before it and the queue's name, so a message can't be moved to
another queue. The bytes depend only on the outbox row and its job.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aijobs.errors import AijobsError
from aijobs.queues.message import MESSAGE_VERSION, JobMessage, OutgoingMessage
from aijobs.settings import KeyRing

TASK = "run_job"
"""The name of the only task. It never changes, because consumers and producers may have different versions."""
PREFIX_BYTES = 8
MAX_BYTES = 4096
"""Maximum size of a message, far above ours. Longer ones aren't read."""

_ID = "aj-"
_PURPOSE = b"aijobs.message"
_TAIL = re.compile(rb',"key":"([A-Za-z0-9]{1,16})","sig":"([0-9a-f]{64})"\}\Z')
_FIELDS = {
    "jobId": "job_id",
    "jobType": "job_type",
    "idempotencyKey": "idempotency_key",
    "createdAt": "created_at",
}


class BadMessage(AijobsError):
    """The bytes are no valid message, or the row can't be encoded. The text holds no content."""


@dataclass(frozen=True)
class Envelope:
    """A decoded message with the id of its event."""

    event_id: str
    message: JobMessage

    @property
    def task_id(self) -> str:
        return _ID + self.event_id


def encode_member(outgoing: OutgoingMessage, keys: KeyRing) -> bytes:
    """Return the member of the sorted set, the same bytes at each call.

    `BadMessage` for a version or key that this process doesn't know, or an event id that is no UUID.
    """
    if outgoing.message_version not in _BODIES:
        raise BadMessage(f"unknown message version {outgoing.message_version}")
    secret = keys.get(outgoing.message_key_id)
    if secret is None:
        raise BadMessage(f"unknown message key {outgoing.message_key_id}")
    body = _BODIES[outgoing.message_version](outgoing)
    signature = _sign(body, secret, outgoing.queue_name)
    data = b'%s,"key":"%s","sig":"%s"}' % (body, outgoing.message_key_id.encode(), signature)
    if len(data) > MAX_BYTES:
        raise BadMessage(f"too long: {len(data)} bytes")
    return _event_uuid(outgoing.event_id).bytes[:PREFIX_BYTES] + data


def decode(data: bytes, keys: KeyRing, queue_name: str) -> Envelope:
    """Return the message of a member without its prefix. `BadMessage` if we didn't write it for this queue."""
    if len(data) > MAX_BYTES:
        raise BadMessage("too long")
    tail = _TAIL.search(data)
    if tail is None:
        raise BadMessage("not a signed message")
    key_id, signature = tail.groups()
    secret = keys.get(key_id.decode())
    if secret is None:
        raise BadMessage("unknown key")
    body = data[: tail.start()]
    if not hmac.compare_digest(_sign(body, secret, queue_name), signature):
        raise BadMessage("wrong signature")
    return _read(body)


def arguments(message: JobMessage) -> dict[str, str]:
    """Return the message as the task's only positional argument, with exactly four keys."""
    return {key: getattr(message, name) for key, name in _FIELDS.items()}


def read_arguments(argument: object) -> JobMessage:
    """Return the message of an argument. `BadMessage` for missing, extra or wrong fields."""
    if not isinstance(argument, dict) or set(argument) != set(_FIELDS):
        raise BadMessage("the argument doesn't hold exactly the four fields")
    if not all(isinstance(value, str) for value in argument.values()):
        raise BadMessage("a field is no text")
    return JobMessage(**{name: argument[key] for key, name in _FIELDS.items()})


def event_id_of(task_id: str) -> str | None:
    """Return the event id of a task id; None if the task isn't ours."""
    return task_id.removeprefix(_ID) if task_id.startswith(_ID) else None


def _body(outgoing: OutgoingMessage) -> bytes:
    """Return the JSON of version 1, without its closing brace."""
    envelope: Mapping[str, object] = {
        "id": _ID + outgoing.event_id,
        "v": 1,
        "task": TASK,
        "args": [arguments(outgoing.message)],
    }
    return json.dumps(envelope, separators=(",", ":"), ensure_ascii=True).encode()[:-1]


_BODIES: Mapping[int, Callable[[OutgoingMessage], bytes]] = {MESSAGE_VERSION: _body}
"""All versions that rows may still have, so that messages of an older release are found."""


def _sign(body: bytes, secret: bytes, queue_name: str) -> bytes:
    text = b"\0".join((_PURPOSE, queue_name.encode(), body))
    return hmac.new(secret, text, hashlib.sha256).hexdigest().encode()


def _read(body: bytes) -> Envelope:
    try:
        envelope = json.loads(body + b"}")
        task_id, version, task, args = (envelope[name] for name in ("id", "v", "task", "args"))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadMessage("not an envelope") from None
    if version not in _BODIES:
        raise BadMessage("unknown message version")
    if task != TASK:
        raise BadMessage("unknown task")
    if not isinstance(args, list) or len(args) != 1:
        raise BadMessage("not exactly one argument")
    if not isinstance(task_id, str) or not task_id.startswith(_ID):
        raise BadMessage("not a task id of ours")
    return Envelope(str(_event_uuid(task_id.removeprefix(_ID))), read_arguments(args[0]))


def _event_uuid(event_id: str) -> uuid.UUID:
    try:
        return uuid.UUID(event_id)
    except ValueError:
        raise BadMessage("the event id is no UUID") from None
