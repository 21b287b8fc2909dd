"""The bytes of a message: deterministic and signed; everything else is refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from aijobs.ids import new_id
from aijobs.queues.codec import (
    MAX_BYTES,
    PREFIX_BYTES,
    BadMessage,
    _sign,
    arguments,
    decode,
    encode_member,
    read_arguments,
)
from aijobs.settings import KeyRing
from tests.support.messages import KEYS, SECRET, outgoing

OTHER_SECRET = "1" * 32
QUEUE = "ai-interactive"


def body(member: bytes) -> bytes:
    return member[PREFIX_BYTES:]


def signed_by_us(envelope: dict[str, object], queue_name: str = QUEUE) -> bytes:
    """Sign any envelope with a valid key, as a bug of ours could."""
    text = json.dumps(envelope, separators=(",", ":")).encode()[:-1]
    return b'%s,"key":"k1","sig":"%s"}' % (text, _sign(text, SECRET.encode(), queue_name))


def envelope(**changes: object) -> dict[str, object]:
    message = outgoing()
    fields: dict[str, object] = {
        "id": f"aj-{message.event_id}",
        "v": 1,
        "task": "run_job",
        "args": [arguments(message.message)],
    }
    return {**fields, **changes}


def test_message_is_encoded_to_the_same_bytes_each_time() -> None:
    message = outgoing()

    assert encode_member(message, KEYS) == encode_member(replace(message), KEYS)


def test_message_is_decoded_as_encoded() -> None:
    message = outgoing()

    read = decode(body(encode_member(message, KEYS)), KEYS, QUEUE)

    assert read.event_id == message.event_id
    assert read.task_id == f"aj-{message.event_id}"
    assert read.message == message.message


def test_message_argument_has_exactly_four_fields() -> None:
    message = outgoing()

    read = json.loads(body(encode_member(message, KEYS)))

    assert read["task"] == "run_job"
    assert read["id"] == f"aj-{message.event_id}"
    assert read["args"] == [
        {
            "jobId": message.message.job_id,
            "jobType": "synthetic",
            "idempotencyKey": message.message.idempotency_key,
            "createdAt": "2026-01-31T08:00:00.000001Z",
        }
    ]


def test_members_sort_by_the_creation_of_their_events() -> None:
    members = [encode_member(outgoing(event_id=new_id()), KEYS) for _ in range(3000)]

    assert members == sorted(members)


def test_message_with_an_older_key_keeps_its_bytes_after_a_rotation() -> None:
    rotated = KeyRing.parse(f"k2:{OTHER_SECRET},k1:{SECRET}", "test")
    message = outgoing(message_key_id="k1")

    assert encode_member(message, rotated) == encode_member(message, KEYS)
    assert decode(body(encode_member(message, KEYS)), rotated, QUEUE).message == message.message


def test_different_keys_give_different_signatures() -> None:
    rotated = KeyRing.parse(f"k2:{OTHER_SECRET},k1:{SECRET}", "test")
    message = outgoing()

    assert encode_member(message, rotated) != encode_member(replace(message, message_key_id="k2"), rotated)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"message_version": 99}, "unknown message version 99"),
        ({"message_key_id": "gone"}, "unknown message key gone"),
        ({"event_id": "no-uuid"}, "the event id is no UUID"),
        ({"job_type": "x" * MAX_BYTES}, "too long"),
    ],
)
def test_row_that_cannot_be_encoded_is_named(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        encode_member(outgoing(**changes), KEYS)


def test_changed_message_is_refused() -> None:
    message = outgoing()
    data = body(encode_member(message, KEYS))
    changed = data.replace(message.message.job_id.encode(), new_id().encode())

    assert changed != data
    with pytest.raises(BadMessage, match="wrong signature"):
        decode(changed, KEYS, QUEUE)


def test_message_of_another_queue_is_refused() -> None:
    data = body(encode_member(outgoing(queue_name="ai-background"), KEYS))

    with pytest.raises(BadMessage, match="wrong signature"):
        decode(data, KEYS, QUEUE)


def test_message_with_a_removed_key_is_refused() -> None:
    data = body(encode_member(outgoing(), KEYS))

    with pytest.raises(BadMessage, match="unknown key"):
        decode(data, KeyRing.parse(f"k2:{SECRET}", "test"), QUEUE)


class Bomb:
    """Raises another error than the test expects when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise AssertionError('a pickle was run')",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"\x00" * 64,
        b"{}",
        b'{"id":"aj-x"}',
        b"[" * 4000,
        pickle.dumps(Bomb()),
        body(encode_member(outgoing(), KEYS))[:-1],
        body(encode_member(outgoing(), KEYS)) + b"\n",
        b"{" * (5 * 1024 * 1024),
        body(encode_member(outgoing(), KEYS)) * 20,
    ],
    ids=["empty", "a byte", "zeros", "no fields", "no tail", "deep", "pickle", "cut", "longer", "5 MB", "many"],
)
def test_bytes_that_are_no_message_are_refused_and_not_unpickled(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(data, KEYS, QUEUE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": "os.system"}, "unknown task"),
        ({"v": 2}, "unknown message version"),
        ({"v": "1"}, "unknown message version"),
        ({"id": "x"}, "not a task id of ours"),
        ({"id": 7}, "not a task id of ours"),
        ({"id": "aj-x"}, "the event id is no UUID"),
        ({"args": []}, "not exactly one argument"),
        ({"args": [1, 2]}, "not exactly one argument"),
        ({"args": {}}, "not exactly one argument"),
        ({"args": [None]}, "exactly the four fields"),
        ({"args": [{"jobId": "x"}]}, "exactly the four fields"),
        ({"args": [{**arguments(outgoing().message), "userId": "u"}]}, "exactly the four fields"),
        ({"args": [{**arguments(outgoing().message), "jobId": 7}]}, "a field is no text"),
    ],
)
def test_signed_message_of_another_shape_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        decode(signed_by_us(envelope(**changes)), KEYS, QUEUE)


def test_signed_message_with_a_missing_field_is_refused() -> None:
    whole = envelope()
    whole.pop("task")

    with pytest.raises(BadMessage, match="not an envelope"):
        decode(signed_by_us(whole), KEYS, QUEUE)


def test_refusal_does_not_quote_the_message() -> None:
    data = signed_by_us(envelope(args=[{"jobId": "canary-4711"}]))

    with pytest.raises(BadMessage) as refused:
        decode(data, KEYS, QUEUE)

    assert "canary-4711" not in str(refused.value)


def test_message_arguments_are_read_as_written() -> None:
    message = outgoing().message

    assert read_arguments(arguments(message)) == message
