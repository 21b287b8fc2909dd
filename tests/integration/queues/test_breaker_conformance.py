"""Rules for every store of breakers and call slots; the in-memory doubles obey the same rules as Redis."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from aijobs.ai.calling.breaker import BreakerStore, CircuitBreaker, scope_of
from aijobs.ai.calling.slots import UNLIMITED, CallSlots
from aijobs.errors import BrokerUnavailable
from aijobs.ids import InstanceId
from aijobs.queues import connection
from aijobs.queues.breaker_store import RedisBreakerStore
from aijobs.queues.call_slots import RedisCallSlots, slot_key
from aijobs.queues.connection import ACL_RULES, SHORT_TIMEOUT_S, ImpatientClient, connect
from aijobs.queues.shared_texts import SharedTexts
from aijobs.testing.memory_breaker_store import MemoryBreakerStore
from aijobs.testing.memory_call_slots import MemoryCallSlots
from tests.support.polling import poll
from tests.support.processes import Processes
from tests.support.servers import ValkeyServer

SCOPE, OTHER = scope_of("deepseek"), scope_of("deepseek", "0190-user")
MINUTE = timedelta(minutes=1)


@dataclass
class Case:
    """A store, call slots, and controls for the test."""

    store: BreakerStore
    slots: CallSlots
    pass_time: Callable[[float], None]
    break_down: Callable[[], None]


def in_memory() -> Case:
    store, now = MemoryBreakerStore(), [0.0]
    slots = MemoryCallSlots(lambda: now[0])

    def pass_time(seconds: float) -> None:
        store.advance(seconds)
        now[0] += seconds

    def break_down() -> None:
        store.away = slots.away = True

    return Case(store, slots, pass_time, break_down)


def in_redis(valkey: ValkeyServer) -> Case:
    texts = SharedTexts(ImpatientClient(connect(valkey.url, timeout_s=SHORT_TIMEOUT_S)))
    return Case(RedisBreakerStore(texts), RedisCallSlots(texts, InstanceId.current()), time.sleep, valkey.stop)


@pytest.fixture(params=["memory", "redis"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param == "memory":
        yield in_memory()
        return
    request.getfixturevalue("redis_url")
    yield in_redis(request.getfixturevalue("valkey"))


def at_once(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Run `act` in `count` threads at the same moment and return the results."""
    gate, got = threading.Barrier(count), [None] * count

    def run(place: int) -> None:
        gate.wait(10)
        got[place] = act(place)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return got


# --- the store --------------------------------------------------------------------------------------------


def test_swap_writes_only_over_the_expected_text(case: Case) -> None:
    assert case.store.read([SCOPE, OTHER])[1] == [None, None]
    assert case.store.swap(SCOPE, None, "first", MINUTE)
    assert not case.store.swap(SCOPE, None, "second", MINUTE)
    assert not case.store.swap(SCOPE, "else", "second", MINUTE)
    assert case.store.read([OTHER, SCOPE])[1] == [None, "first"]
    assert case.store.swap(SCOPE, "first", "第二", MINUTE)
    assert case.store.read([SCOPE])[1] == ["第二"]
    assert not case.store.swap(SCOPE, "first", None, MINUTE)
    assert case.store.swap(SCOPE, "第二", None, MINUTE)
    assert case.store.read([SCOPE])[1] == [None]


def test_text_expires_after_its_lifetime(case: Case) -> None:
    before, _ = case.store.read([SCOPE])
    case.store.swap(SCOPE, None, "short", timedelta(milliseconds=50))
    case.pass_time(0.1)
    after, texts = case.store.read([SCOPE])
    assert texts == [None]
    assert after - before >= 100
    assert case.store.swap(SCOPE, None, "again", MINUTE)


def test_one_of_many_concurrent_swaps_succeeds(case: Case) -> None:
    case.store.swap(SCOPE, None, "seen", MINUTE)
    wrote = at_once(20, lambda place: case.store.swap(SCOPE, "seen", f"by {place}", MINUTE))
    assert wrote.count(True) == 1
    assert case.store.read([SCOPE])[1] == [f"by {wrote.index(True)}"]


def test_breaker_counts_as_closed_during_a_store_outage(case: Case) -> None:
    breaker = CircuitBreaker(case.store, failures=1, open_s=30)
    breaker.failed(SCOPE)
    assert breaker.admit(SCOPE) is not None
    case.break_down()
    with pytest.raises(BrokerUnavailable):
        case.store.read([SCOPE])
    with pytest.raises(BrokerUnavailable):
        case.store.swap(SCOPE, None, "x", MINUTE)
    with capture_logs() as lines:
        assert breaker.admit(SCOPE) is None
        assert breaker.blocked_for(SCOPE) is None
        breaker.failed(SCOPE)
        breaker.succeeded(SCOPE)
        assert [state.word for state in breaker.states([SCOPE])] == ["unknown"]
    assert [line["event"] for line in lines] == ["breaker.store.away"]
    with pytest.raises(BrokerUnavailable):
        breaker.reset(SCOPE)


# --- the breaker over it ----------------------------------------------------------------------------------


def test_one_of_forty_concurrent_callers_makes_the_probe(case: Case) -> None:
    breakers = [CircuitBreaker(case.store, failures=1, open_s=0.05) for _ in range(40)]
    breakers[0].failed(SCOPE)
    case.pass_time(0.06)
    waits = at_once(40, lambda place: breakers[place].admit(SCOPE))
    assert waits.count(None) == 1
    assert all(wait > timedelta() for wait in waits if wait is not None)


def test_failures_of_many_processes_are_added(case: Case) -> None:
    breakers = [CircuitBreaker(case.store, failures=5, open_s=30) for _ in range(5)]
    at_once(5, lambda place: breakers[place].failed(SCOPE, code="PROVIDER_TIMEOUT"))
    (state,) = breakers[0].states([SCOPE])
    assert (state.word, state.failures, state.opened, state.why) == ("open", 5, 1, "PROVIDER_TIMEOUT")


# --- slots ------------------------------------------------------------------------------------------------


def test_slots_are_limited_and_each_is_released_once(case: Case) -> None:
    tokens = [case.slots.take("deepseek", 3, 60) for _ in range(3)]
    assert len(set(tokens)) == 3
    assert case.slots.take("deepseek", 3, 60) is None
    assert case.slots.in_use("deepseek", 3) == 3
    assert case.slots.take("openai", 3, 60) is not None
    case.slots.release("deepseek", tokens[1] or "")
    assert case.slots.in_use("deepseek", 3) == 2
    again = case.slots.take("deepseek", 3, 60)
    assert again not in (None, *tokens)
    case.slots.release("deepseek", tokens[1] or "")
    assert case.slots.in_use("deepseek", 3) == 3


def test_no_limit_takes_no_slot(case: Case) -> None:
    assert {case.slots.take("deepseek", 0, 60) for _ in range(5)} == {UNLIMITED}
    assert case.slots.in_use("deepseek", 0) is None
    case.slots.release("deepseek", UNLIMITED)


def test_expired_slot_is_free_and_its_late_release_changes_nothing(case: Case) -> None:
    dead = case.slots.take("deepseek", 1, 0.05)
    assert case.slots.take("deepseek", 1, 60) is None
    case.pass_time(0.06)
    heir = case.slots.take("deepseek", 1, 60)
    assert heir is not None
    case.slots.release("deepseek", dead or "")
    assert case.slots.take("deepseek", 1, 60) is None


def test_forty_concurrent_callers_never_exceed_the_limit(case: Case) -> None:
    tokens = at_once(40, lambda _: case.slots.take("deepseek", 7, 60))
    assert len({token for token in tokens if token}) == 7
    assert case.slots.in_use("deepseek", 7) == 7


def test_calls_are_unlimited_during_a_store_outage(case: Case) -> None:
    held = case.slots.take("deepseek", 1, 60) or ""
    case.break_down()
    with capture_logs() as lines:
        assert case.slots.take("deepseek", 1, 60) == UNLIMITED
        assert case.slots.in_use("deepseek", 1) is None
        case.slots.release("deepseek", held)
    assert [line["event"] for line in lines] in ([], ["calls.slots.away"])


# --- Redis alone ------------------------------------------------------------------------------------------


def test_frozen_redis_delays_the_breaker_only_once(
    redis_url: str, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    texts = SharedTexts(ImpatientClient(connect(redis_url, timeout_s=0.2), pause_s=0.2))
    breaker = CircuitBreaker(RedisBreakerStore(texts), failures=1, open_s=300)
    breaker.failed(SCOPE)
    real = connection.unavailable
    monkeypatch.setattr(connection, "unavailable", lambda *args: asked.append(1) or real(*args))
    valkey.freeze()
    assert [breaker.admit(SCOPE) for _ in range(20)] == [None] * 20
    assert len(asked) == 1
    valkey.thaw()
    poll(lambda: breaker.admit(SCOPE) is not None, timeout=5, what="the breaker is seen again")


def test_breaker_and_slots_work_under_the_documented_redis_user(
    start_valkey: Callable[..., ValkeyServer],
) -> None:
    server = start_valkey(f"user aijobs on >PASSWORD {ACL_RULES}")
    texts = SharedTexts(ImpatientClient(connect(server.url_for("aijobs", "PASSWORD"), timeout_s=2)))
    breaker, slots = (
        CircuitBreaker(RedisBreakerStore(texts), failures=1, open_s=0.02),
        RedisCallSlots(texts, InstanceId.current()),
    )
    breaker.failed(SCOPE, exhausted=True)
    breaker.failed(OTHER)
    time.sleep(0.03)
    assert breaker.admit(OTHER) is None
    breaker.given_back(OTHER)
    assert breaker.admit(OTHER) is None
    breaker.succeeded(OTHER)
    token = slots.take("deepseek", 1, 60)
    with server.client() as client:
        keys = {key.decode() for key in client.scan_iter()}
        assert all(client.pttl(key) > 0 for key in keys)
    assert keys == {f"aijobs:breaker:{SCOPE}", slot_key("deepseek", 0)}
    assert breaker.reset(SCOPE).word in ("open", "half_open")
    slots.release("deepseek", token or "")
    with server.client() as client:
        assert client.keys() == []


RACER = """
import sys, time
from datetime import timedelta
from aijobs.ai.calling.breaker import CircuitBreaker
from aijobs.queues.breaker_store import RedisBreakerStore
from aijobs.queues.call_slots import RedisCallSlots
from aijobs.ids import InstanceId
from aijobs.queues.connection import ImpatientClient, connect
from aijobs.queues.shared_texts import SharedTexts

url, begin, limit = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
texts = SharedTexts(ImpatientClient(connect(url, timeout_s=5)))
breaker, slots = CircuitBreaker(RedisBreakerStore(texts), 1, 0.01), RedisCallSlots(texts, InstanceId.current())
breaker.blocked_for("p.platform")
time.sleep(max(0.0, begin - time.time()))
print("probe", breaker.admit("p.platform") is None)
print("slots", sum(slots.take("p", limit, 60) is not None for _ in range(5)), flush=True)
time.sleep(60)
"""


def test_four_processes_make_one_probe_and_share_the_limit(redis_url: str, processes: Processes) -> None:
    CircuitBreaker(RedisBreakerStore(SharedTexts(ImpatientClient(connect(redis_url)))), failures=1, open_s=0.01).failed(
        "p.platform"
    )
    begin = str(time.time() + 2)
    racers = [processes.spawn([sys.executable, "-c", RACER, redis_url, begin, "5"], name=f"racer{n}") for n in range(4)]
    for racer in racers:
        racer.wait_for_output("slots", timeout=30)
    said = [line for racer in racers for line in racer.output.splitlines()]
    assert said.count("probe True") == 1
    assert sum(int(line.split()[1]) for line in said if line.startswith("slots")) == 5


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_slots_of_a_dead_process_are_free_at_once(redis_url: str, processes: Processes, end: str) -> None:
    slots = RedisCallSlots(SharedTexts(ImpatientClient(connect(redis_url))), InstanceId.current())
    assert slots.take("p", 6, 60) is not None, "one of ours"
    holder = processes.spawn([sys.executable, "-c", RACER, redis_url, "0", "6"], name="holder")
    holder.wait_for_output("slots 5", timeout=30)
    assert (slots.in_use("p", 6), slots.take("p", 6, 60)) == (6, None)
    getattr(holder, end)()
    assert slots.in_use("p", 6) == 1
    taken = [slots.take("p", 6, 60) for _ in range(6)]
    assert [token is not None for token in taken] == [True] * 5 + [False]
    slots.release("p", taken[0] or "")
    assert slots.in_use("p", 6) == 5


def test_slot_of_another_host_is_held_until_it_expires(redis_url: str) -> None:
    texts, here = SharedTexts(ImpatientClient(connect(redis_url))), InstanceId.current()
    elsewhere = replace(here, host="another", boot="boot", pid=2**22 + 1)
    assert RedisCallSlots(texts, elsewhere).take("p", 1, 60) is not None
    assert RedisCallSlots(texts, here).take("p", 1, 60) is None
