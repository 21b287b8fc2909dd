"""The circuit breaker, with a clock that the tests advance."""

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


def test_scopes_differ_by_provider_and_by_key_owner() -> None:
    scopes = {scope_of("a"), scope_of("b"), scope_of("a", "c1"), scope_of("a", "c2")}
    assert scopes == {"a.platform", "b.platform", "a.cred-c1", "a.cred-c2"}


def test_breaker_opens_at_the_limit_of_consecutive_failures(breaker: CircuitBreaker) -> None:
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


def test_success_resets_the_count_of_failures(breaker: CircuitBreaker) -> None:
    for _ in range(5):
        breaker.failed(SCOPE)
        breaker.failed(SCOPE)
        breaker.succeeded(SCOPE)
    assert word(breaker) == "closed"


def test_failures_more_than_a_minute_apart_do_not_open_the_breaker(
    breaker: CircuitBreaker, store: MemoryBreakerStore
) -> None:
    for _ in range(6):
        breaker.failed(SCOPE)
        store.advance(31)
    assert word(breaker) == "closed"
    breaker.failed(SCOPE)
    breaker.failed(SCOPE)
    assert word(breaker) == "open"


def test_users_key_opens_no_breaker_of_the_platform_or_of_another_user(breaker: CircuitBreaker) -> None:
    mine, theirs = scope_of("deepseek", "mine"), scope_of("deepseek", "theirs")
    for _ in range(9):
        breaker.failed(mine)
    assert [word(breaker, scope) for scope in (mine, theirs, SCOPE)] == ["open", "closed", "closed"]
    assert breaker.admit(SCOPE) is None


def test_exhausted_account_opens_the_breaker_at_once_for_the_longest_time(breaker: CircuitBreaker) -> None:
    breaker.failed(SCOPE, exhausted=True)
    assert seconds(breaker.admit(SCOPE)) == 300
    assert breaker.states([SCOPE])[0].why == "PROVIDER_ACCOUNT_EXHAUSTED"


def test_exhausted_account_prolongs_an_open_breaker(breaker: CircuitBreaker, store: MemoryBreakerStore) -> None:
    open_it(breaker)
    store.advance(20)
    breaker.failed(SCOPE, exhausted=True)
    assert seconds(breaker.admit(SCOPE)) == 300


def test_failures_of_calls_begun_before_it_opened_change_nothing(
    breaker: CircuitBreaker, store: MemoryBreakerStore
) -> None:
    open_it(breaker)
    store.advance(10)
    for _ in range(20):
        breaker.failed(SCOPE)
    state = breaker.states([SCOPE])[0]
    assert (state.opened, state.failures, seconds(state.open_for)) == (1, 3, 20)


def test_success_of_an_old_call_does_not_close_an_open_breaker(breaker: CircuitBreaker) -> None:
    open_it(breaker)
    breaker.succeeded(SCOPE)
    assert word(breaker) == "open"


def test_half_open_breaker_allows_one_probe_whose_success_closes_it(
    breaker: CircuitBreaker, store: MemoryBreakerStore
) -> None:
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


def test_failed_probe_doubles_the_open_time_up_to_ten_times_the_first(
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


def test_inconclusive_probe_is_repeated_by_the_next_call(breaker: CircuitBreaker, store: MemoryBreakerStore) -> None:
    open_it(breaker)
    store.advance(30)
    assert breaker.admit(SCOPE) is None
    breaker.given_back(SCOPE)
    assert breaker.admit(SCOPE) is None


def test_other_call_does_not_end_a_probe(breaker: CircuitBreaker, store: MemoryBreakerStore) -> None:
    assert breaker.admit(SCOPE) is None
    open_it(breaker)
    store.advance(30)
    prober = threading.Thread(target=breaker.admit, args=(SCOPE,))
    prober.start()
    prober.join(10)
    breaker.given_back(SCOPE)
    assert breaker.admit(SCOPE) is not None


def test_probe_of_a_dead_worker_is_repeated_when_its_lease_expires(
    breaker: CircuitBreaker, store: MemoryBreakerStore
) -> None:
    open_it(breaker)
    store.advance(30)
    assert breaker.admit(SCOPE, timedelta(seconds=45)) is None
    store.advance(44)
    assert seconds(breaker.admit(SCOPE)) == 1
    store.advance(1)
    assert breaker.admit(SCOPE) is None


def test_waiting_times_are_spread(store: MemoryBreakerStore) -> None:
    chances = iter([0.0, 0.5, 1.0])
    breaker = CircuitBreaker(store, failures=1, open_s=30, chance=lambda: next(chances))
    breaker.failed(SCOPE)
    assert [seconds(breaker.admit(SCOPE)) for _ in range(3)] == [30, 33, 36]


def test_unused_breaker_expires_after_an_hour(breaker: CircuitBreaker, store: MemoryBreakerStore) -> None:
    open_it(breaker)
    store.advance(30 + 3599)
    assert word(breaker) == "half_open"
    store.advance(2)
    assert word(breaker) == "closed"


def test_breaker_closed_by_hand_starts_again_from_zero(breaker: CircuitBreaker) -> None:
    breaker.failed(SCOPE, exhausted=True)
    assert breaker.reset(SCOPE).word == "open"
    assert breaker.reset(SCOPE).word == "closed"
    assert breaker.admit(SCOPE) is None
    breaker.failed(SCOPE)
    assert word(breaker) == "closed"


class Contended(MemoryBreakerStore):
    """A store in which another process always writes first."""

    def swap(self, scope: str, seen: str | None, new: str | None, keep: timedelta) -> bool:
        return False


def test_contended_reset_raises_instead_of_reporting_success() -> None:
    store = Contended()
    until = store.read([])[0] + 600_000
    MemoryBreakerStore.swap(store, SCOPE, None, f'{{"opened": 1, "until": {until}}}', timedelta(hours=1))
    breaker = CircuitBreaker(store, failures=3, open_s=30)
    with pytest.raises(BrokerUnavailable, match="try again"):
        breaker.reset(SCOPE)
    assert word(breaker) == "open"


def test_uncounted_failure_is_logged_once_per_scope() -> None:
    breaker = CircuitBreaker(Contended(), failures=3, open_s=30)
    with capture_logs() as seen:
        for _ in range(3):
            breaker.failed(SCOPE)
        breaker.failed("other.platform")
    logged = [(line["event"], line["scope"], line["log_level"]) for line in seen]
    assert logged == [("breaker.contended", SCOPE, "warning"), ("breaker.contended", "other.platform", "warning")]


@pytest.mark.parametrize("text", ["", "no json", "[]", "7", '{"colour": "red"}', '{"failed_at": 5}', "null"])
def test_unreadable_breaker_state_counts_as_closed_and_is_overwritten(
    breaker: CircuitBreaker, store: MemoryBreakerStore, text: str
) -> None:
    store.swap(SCOPE, None, text, timedelta(hours=1))
    assert breaker.admit(SCOPE) is None
    open_it(breaker)
    assert word(breaker) == "open"


def test_states_are_returned_in_the_requested_order(breaker: CircuitBreaker) -> None:
    breaker.failed("b.platform", exhausted=True)
    states = breaker.states(["c.platform", "b.platform", "a.platform"])
    assert [(state.scope, state.word) for state in states] == [
        ("c.platform", "closed"),
        ("b.platform", "open"),
        ("a.platform", "closed"),
    ]
    assert breaker.states([]) == []
