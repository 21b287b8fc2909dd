"""Invalid values under our keys in Redis are treated as absent and logged once a minute."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aijobs import reading
from aijobs.ai.calling.breaker import CircuitBreaker
from aijobs.ids import InstanceId
from aijobs.logs import Sparing
from aijobs.queues.breaker_store import PREFIX, RedisBreakerStore
from aijobs.queues.broker import RedisBroker, cancel_key
from aijobs.queues.call_slots import RedisCallSlots, slot_key
from aijobs.queues.connection import ImpatientClient, connect
from aijobs.queues.presence import HEARTBEAT_PREFIX, Presence, PresenceReader
from aijobs.queues.shared_texts import SharedTexts
from tests.support.lines import captured_lines
from tests.support.messages import KEYS
from tests.support.servers import ValkeyServer

SCOPE = "deepseek.platform"
ANYTHING = [
    b"",
    b"null",
    b"true",
    b"[]",
    b"{}}",
    b"NaN",
    b"\xff\xfe",
    b'"\\ud800"',
    b"1" + b"0" * 5000,
    b"[" * 100_000,
    b'{"a":' * 100_000,
]
BREAKERS = [
    b'{"opened":1,"until":1e999}',
    b'{"opened":1,"until":1' + b"0" * 30 + b"}",
    b'{"opened":1,"until":253402300799999}',
    b'{"opened":1,"since":253402300799999}',
    b'{"opened":1,"until":-5}',
    b'{"opened":true,"until":"soon"}',
    b'{"opened":null}',
    b'{"failed_at":[1e999]}',
    b'{"failed_at":[[]]}',
    b'{"failed_at":{"a":1}}',
    b'{"why":7}',
]


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the log limit, so that warnings of earlier tests suppress none of these."""
    monkeypatch.setattr(reading, "_sparing", Sparing())


@pytest.fixture
def client(redis_url: str) -> ImpatientClient:
    return ImpatientClient(connect(redis_url))


def card(**changes: Any) -> bytes:
    fields = {
        "instanceId": "host~boot~1~77~5~ab",
        "queue": "ai-interactive",
        "host": "host",
        "pid": 77,
        "startedAt": "2026-03-01T08:00:00.000Z",
        "activeJobCount": 1,
        "activeJobIds": ["x"],
    }
    return json.dumps({**fields, **changes}).encode()


CARDS = [
    card(pid=10**30),
    card(pid=-1),
    card(pid="77"),
    card(pid=True),
    card().replace(b'"pid": 77', b'"pid": 1e999'),
    card(startedAt="0001-01-01T00:00:00+14:00"),
    card(startedAt="9999-12-31T23:59:59-14:00"),
    card(startedAt="2026-03-01T08:00:00"),
    card(startedAt=10**30),
    card(activeJobCount=10**30),
    card(activeJobIds="abc"),
    card(activeJobIds=[["x"]]),
    card(activeJobIds=None),
    card(queue={}),
    card(host="h" * 10_000),
    card(lastPopMs=10**30),
    card(lastAskedMs="soon"),
]


def test_invalid_breaker_value_counts_as_closed_and_is_overwritten(
    client: ImpatientClient, valkey: ValkeyServer
) -> None:
    breaker = CircuitBreaker(RedisBreakerStore(SharedTexts(client)), failures=1, open_s=30)
    key = PREFIX + SCOPE
    with valkey.client() as admin, captured_lines() as lines:
        for junk in [*ANYTHING, *BREAKERS]:
            admin.set(key, junk)
            assert [state.word for state in breaker.states([SCOPE])] == ["closed"], junk[:60]
            assert breaker.admit(SCOPE) is None
            breaker.failed(SCOPE)
            assert breaker.states([SCOPE])[0].word == "open", junk[:60]
        admin.delete(key)
        admin.rpush(key, "a list")
        assert breaker.states([SCOPE])[0].word == "closed"
        breaker.failed(SCOPE)
        assert breaker.states([SCOPE])[0].word == "open"
        logged = [line["kind"] for line in lines() if line["event"] == "stored.unreadable"]
    assert logged == ["breaker"], "once a minute"


def test_invalid_heartbeats_hide_no_worker(client: ImpatientClient, valkey: ValkeyServer) -> None:
    with valkey.client() as admin, captured_lines() as lines:
        for number, junk in enumerate([*ANYTHING, *CARDS]):
            admin.set(f"{HEARTBEAT_PREFIX}junk{number}", junk, ex=60)
        admin.set(f"{HEARTBEAT_PREFIX}for-ever", card())
        admin.rpush(f"{HEARTBEAT_PREFIX}list", "a list")
        admin.set(HEARTBEAT_PREFIX.encode() + b"\xff\xfe", card(pid=0), ex=60)
        Presence(connect(valkey.url), InstanceId.current(), "ai-interactive").beat()
        admin.set(f"{HEARTBEAT_PREFIX}other", card(somethingNew=[1]), ex=60)
        assert {each.pid for each in PresenceReader(client).read()} == {77, InstanceId.current().pid}
        logged = [line["kind"] for line in lines() if line["event"] == "stored.unreadable"]
    assert logged == ["heartbeat"]


def test_invalid_call_slot_value_is_free(client: ImpatientClient, valkey: ValkeyServer) -> None:
    slots = RedisCallSlots(SharedTexts(client), InstanceId.current())
    junk = [b"junk", b"\xff", b"a~b~c~\xc2\xb2~e~f", b"a~b~c~" + b"9" * 5000 + b"~e~f"]
    with valkey.client() as admin:
        for number, text in enumerate(junk):
            admin.set(slot_key("p", number), text)
        admin.rpush(slot_key("p", len(junk)), "a list")
    most = len(junk) + 1
    assert slots.in_use("p", most) == 0
    taken = [slots.take("p", most, 60) for _ in range(most)]
    assert None not in taken
    assert (slots.in_use("p", most), slots.take("p", most, 60)) == (most, None)


@pytest.mark.parametrize("junk", [b"", b"\xff", b"[" * 1000])
def test_cancel_hint_with_any_text_counts(redis_url: str, valkey: ValkeyServer, junk: bytes) -> None:
    broker = RedisBroker.at(redis_url, KEYS)
    with valkey.client() as admin:
        admin.set(cancel_key("one"), junk)
        admin.rpush(cancel_key("two"), "a list")
    assert broker.find_cancel_hints(["one", "two", "three"]) == {"one"}
