"""The rule of the circuit breaker, by a clock that is moved by hand."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from aijobs.ai.calling.breaker import CircuitBreaker, scope_of
from aijobs.errors import BrokerUnavailable
from aijobs.testing.memory_breaker_store import MemoryBreakerStore

SCOPE = scope_of("deepseek")


@pytest.fixture
def store() -> MemoryBreakerStore:
    return MemoryBreakerStore()


@pytest.fixture
def breaker(store: MemoryBreakerStore) -> CircuitBreaker:
    return CircuitBreaker(store, failures=3, open_s=30, chance=lambda: 0.0)


def open_it(breaker: CircuitBreaker) -> None:
    for _ in range(3):
        breaker.failed(SCOPE)


def word(breaker: CircuitBreaker, scope: str = SCOPE) -> str:
    return breaker.states([scope])[0].word


def seconds(wait: timedelta | None) -> float | None:
    return None if wait is None else wait.total_seconds()


def test_scopes_are_told_apart_by_provider_and_by_whose_key_it_is() -> None:
    scopes = {scope_of("a"), scope_of("b"), scope_of("a", "c1"), scope_of("a", "c2")}
    assert scopes == {"a.platform", "b.platform", "a.cred-c1", "a.cred-c2"}


def test_it_opens_at_the_last_failure_in_a_row_and_not_before(breaker: CircuitBreaker) -> None:
    for _ in range(2):
        breaker.failed(SCOPE, code="PROVIDER_TIMEOUT")
    assert breaker.admit(SCOPE) is None
    with capture_logs() as lines:
        breaker.failed(SCOPE, code="PROVIDER_RATE_LIMITED")
    assert seconds(breaker.admit(SCOPE)) == 30
    assert seconds(breaker.blocked_for(SCOPE)) == 30
    (line,) = lines
    assert (line["event"], line["scope"], line["why"]) == ("breaker.opened", SCOPE, "PROVIDER_RATE_LIMITED")
    assert (line["openMs"], line["log_level"]) == (30_000, "warning")


def test_a_success_between_failures_begins_the_row_anew(breaker: CircuitBreaker) -> None:
    for _ in range(5):
        breaker.failed(SCOPE)
        breaker.failed(SCOPE)
        breaker.succeeded(SCOPE)
    assert word(breaker) == "closed"


def test_failures_that_lie_over_a_minute_apart_are_no_row(breaker: CircuitBreaker, store: MemoryBreakerStore) -> None:
    for _ in range(6):
        breaker.failed(SCOPE)
        store.advance(31)
    assert word(breaker) == "closed"
    breaker.failed(SCOPE)
    breaker.failed(SCOPE)
    assert word(breaker) == "open"


def test_a_users_key_never_trips_the_platforms_nor_another_users(breaker: CircuitBreaker) -> None:
    mine, theirs = scope_of("deepseek", "mine"), scope_of("deepseek", "theirs")
    for _ in range(9):
        breaker.failed(mine)
    assert [word(breaker, scope) for scope in (mine, theirs, SCOPE)] == ["open", "closed", "closed"]
    assert breaker.admit(SCOPE) is None


def test_an_empty_account_opens_it_at_once_and_for_the_longest_time(breaker: CircuitBreaker) -> None:
    breaker.failed(SCOPE, exhausted=True)
    assert seconds(breaker.admit(SCOPE)) == 300
    assert breaker.states([SCOPE])[0].why == "PROVIDER_ACCOUNT_EXHAUSTED"


def test_an_empty_account_found_while_it_is_open_makes_it_longer(
    breaker: CircuitBreaker, store: MemoryBreakerStore
) -> None:
    open_it(breaker)
    store.advance(20)
    breaker.failed(SCOPE, exhausted=True)
    assert seconds(breaker.admit(SCOPE)) == 300


def test_failures_that_were_under_way_when_it_opened_change_nothing(
    breaker: CircuitBreaker, store: MemoryBreakerStore
) -> None:
    open_it(breaker)
    store.advance(10)
    for _ in range(20):
        breaker.failed(SCOPE)
    state = breaker.states([SCOPE])[0]
    assert (state.opened, state.failures, seconds(state.open_for)) == (1, 3, 20)


def test_a_lucky_old_call_does_not_close_an_open_breaker(breaker: CircuitBreaker) -> None:
    open_it(breaker)
    breaker.succeeded(SCOPE)
    assert word(breaker) == "open"


def test_the_probe_is_one_and_its_success_lets_all_through(breaker: CircuitBreaker, store: MemoryBreakerStore) -> None:
    open_it(breaker)
    store.advance(30)
    assert word(breaker) == "half_open"
    assert breaker.blocked_for(SCOPE) is None
    assert breaker.admit(SCOPE) is None
    assert seconds(breaker.admit(SCOPE)) == 5
    assert seconds(breaker.blocked_for(SCOPE)) == 5
    assert breaker.states([SCOPE])[0].probing
    with capture_logs() as lines:
        breaker.succeeded(SCOPE)
    assert [line["event"] for line in lines] == ["breaker.closed"]
    assert [breaker.admit(SCOPE) for _ in range(3)] == [None, None, None]


def test_each_failed_probe_doubles_the_time_up_to_ten_times_the_first(
    breaker: CircuitBreaker, store: MemoryBreakerStore
) -> None:
    open_it(breaker)
    waits = []
    for _ in range(6):
        wait = breaker.admit(SCOPE)
        assert wait is not None
        waits.append(seconds(wait))
        store.advance(wait.total_seconds())
        assert breaker.admit(SCOPE) is None
        breaker.failed(SCOPE)
    assert waits == [30, 60, 120, 240, 300, 300]
    store.advance(300)
    assert breaker.admit(SCOPE) is None
    breaker.succeeded(SCOPE)
    open_it(breaker)
    assert seconds(breaker.admit(SCOPE)) == 30


def test_a_probe_that_told_nothing_leaves_its_place_to_the_next(
    breaker: CircuitBreaker, store: MemoryBreakerStore
) -> None:
    open_it(breaker)
    store.advance(30)
    assert breaker.admit(SCOPE) is None
    breaker.given_back(SCOPE)
    assert breaker.admit(SCOPE) is None


def test_a_call_that_is_no_probe_gives_no_ones_probe_back(breaker: CircuitBreaker, store: MemoryBreakerStore) -> None:
    assert breaker.admit(SCOPE) is None
    open_it(breaker)
    store.advance(30)
    prober = threading.Thread(target=breaker.admit, args=(SCOPE,))
    prober.start()
    prober.join(10)
    breaker.given_back(SCOPE)
    assert breaker.admit(SCOPE) is not None


def test_a_probe_whose_worker_died_is_made_by_another_when_its_lease_is_over(
    breaker: CircuitBreaker, store: MemoryBreakerStore
) -> None:
    open_it(breaker)
    store.advance(30)
    assert breaker.admit(SCOPE, timedelta(seconds=45)) is None
    store.advance(44)
    assert seconds(breaker.admit(SCOPE)) == 1
    store.advance(1)
    assert breaker.admit(SCOPE) is None


def test_those_who_were_sent_away_do_not_come_back_as_one(store: MemoryBreakerStore) -> None:
    chances = iter([0.0, 0.5, 1.0])
    breaker = CircuitBreaker(store, failures=1, open_s=30, chance=lambda: next(chances))
    breaker.failed(SCOPE)
    assert [seconds(breaker.admit(SCOPE)) for _ in range(3)] == [30, 33, 36]


def test_a_breaker_that_nobody_asks_any_more_is_forgotten(breaker: CircuitBreaker, store: MemoryBreakerStore) -> None:
    open_it(breaker)
    store.advance(30 + 3599)
    assert word(breaker) == "half_open"
    store.advance(2)
    assert word(breaker) == "closed"


def test_a_breaker_closed_by_hand_is_as_new(breaker: CircuitBreaker) -> None:
    breaker.failed(SCOPE, exhausted=True)
    assert breaker.reset(SCOPE).word == "open"
    assert breaker.reset(SCOPE).word == "closed"
    assert breaker.admit(SCOPE) is None
    breaker.failed(SCOPE)
    assert word(breaker) == "closed"


class Contended(MemoryBreakerStore):
    """A store in which somebody else was always faster."""

    def swap(self, scope: str, seen: str | None, new: str | None, keep: timedelta) -> bool:
        return False


def test_a_breaker_that_others_change_all_the_time_is_not_told_to_be_closed() -> None:
    store = Contended()
    until = store.read([])[0] + 600_000
    MemoryBreakerStore.swap(store, SCOPE, None, f'{{"opened": 1, "until": {until}}}', timedelta(hours=1))
    breaker = CircuitBreaker(store, failures=3, open_s=30)
    with pytest.raises(BrokerUnavailable, match="try again"):
        breaker.reset(SCOPE)
    assert word(breaker) == "open"


def test_a_failure_that_could_not_be_counted_is_told_once_for_each_scope() -> None:
    breaker = CircuitBreaker(Contended(), failures=3, open_s=30)
    with capture_logs() as seen:
        for _ in range(3):
            breaker.failed(SCOPE)
        breaker.failed("other.platform")
    told = [(line["event"], line["scope"], line["log_level"]) for line in seen]
    assert told == [("breaker.contended", SCOPE, "warning"), ("breaker.contended", "other.platform", "warning")]


@pytest.mark.parametrize("text", ["", "no json", "[]", "7", '{"colour": "red"}', '{"failed_at": 5}', "null"])
def test_what_another_version_wrote_counts_as_closed_and_is_written_over(
    breaker: CircuitBreaker, store: MemoryBreakerStore, text: str
) -> None:
    store.swap(SCOPE, None, text, timedelta(hours=1))
    assert breaker.admit(SCOPE) is None
    open_it(breaker)
    assert word(breaker) == "open"


def test_states_come_in_the_order_they_were_asked_for(breaker: CircuitBreaker) -> None:
    breaker.failed("b.platform", exhausted=True)
    states = breaker.states(["c.platform", "b.platform", "a.platform"])
    assert [(state.scope, state.word) for state in states] == [
        ("c.platform", "closed"),
        ("b.platform", "open"),
        ("a.platform", "closed"),
    ]
    assert breaker.states([]) == []
