"""The bytes of a message: the same each time, signed, and nothing else is let in."""

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
    """An envelope of any content under a good signature, as a bug of ours could make it."""
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


def test_a_message_has_the_same_bytes_each_time_it_is_made() -> None:
    message = outgoing()

    assert encode_member(message, KEYS) == encode_member(replace(message), KEYS)


def test_a_message_is_read_back_as_it_was_written() -> None:
    message = outgoing()

    read = decode(body(encode_member(message, KEYS)), KEYS, QUEUE)

    assert read.event_id == message.event_id
    assert read.task_id == f"aj-{message.event_id}"
    assert read.message == message.message


def test_the_decoded_argument_holds_exactly_the_four_fields() -> None:
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


def test_members_sort_in_the_order_in_which_their_events_were_made() -> None:
    members = [encode_member(outgoing(event_id=new_id()), KEYS) for _ in range(3000)]

    assert members == sorted(members)


def test_a_message_sent_under_an_older_key_keeps_its_bytes_after_rotation() -> None:
    rotated = KeyRing.parse(f"k2:{OTHER_SECRET},k1:{SECRET}", "test")
    message = outgoing(message_key_id="k1")

    assert encode_member(message, rotated) == encode_member(message, KEYS)
    assert decode(body(encode_member(message, KEYS)), rotated, QUEUE).message == message.message


def test_two_keys_give_two_signatures() -> None:
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
def test_a_row_that_no_message_can_be_made_of_is_named(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        encode_member(outgoing(**changes), KEYS)


def test_a_changed_message_is_refused() -> None:
    message = outgoing()
    data = body(encode_member(message, KEYS))
    changed = data.replace(message.message.job_id.encode(), new_id().encode())

    assert changed != data
    with pytest.raises(BadMessage, match="wrong signature"):
        decode(changed, KEYS, QUEUE)


def test_a_message_of_another_queue_is_refused() -> None:
    data = body(encode_member(outgoing(queue_name="ai-background"), KEYS))

    with pytest.raises(BadMessage, match="wrong signature"):
        decode(data, KEYS, QUEUE)


def test_a_message_under_a_key_that_is_gone_is_refused() -> None:
    data = body(encode_member(outgoing(), KEYS))

    with pytest.raises(BadMessage, match="unknown key"):
        decode(data, KeyRing.parse(f"k2:{SECRET}", "test"), QUEUE)


class Bomb:
    """Raises when it is unpickled, which is not the error that the test expects."""

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
def test_what_is_no_message_is_refused_and_not_run(data: bytes) -> None:
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
def test_a_signed_message_of_another_shape_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        decode(signed_by_us(envelope(**changes)), KEYS, QUEUE)


def test_a_signed_message_with_a_field_missing_is_refused() -> None:
    whole = envelope()
    whole.pop("task")

    with pytest.raises(BadMessage, match="not an envelope"):
        decode(signed_by_us(whole), KEYS, QUEUE)


def test_a_refusal_says_nothing_of_what_was_in_the_message() -> None:
    data = signed_by_us(envelope(args=[{"jobId": "canary-4711"}]))

    with pytest.raises(BadMessage) as refused:
        decode(data, KEYS, QUEUE)

    assert "canary-4711" not in str(refused.value)


def test_the_argument_is_the_message_and_back() -> None:
    message = outgoing().message

    assert read_arguments(arguments(message)) == message
