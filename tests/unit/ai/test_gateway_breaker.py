"""An account without balance: the platform's fails no waiting job, and a user's fails only that user's jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from aijobs.ai.calling.breaker import CircuitBreaker, scope_of
from aijobs.ai.errors import ProvidersBusy
from aijobs.ai.prompts import Prompt
from aijobs.ai.provider import CallFailed, CancellationToken, GenerateAnswer, GenerateRequest, Route
from aijobs.errors import JobError
from aijobs.testing.memory_breaker_store import MemoryBreakerStore
from tests.support.gateways import gateway_to
from tests.support.tokens import HandToken

ROUTE = Route("deepseek", "deepseek-flash")
REQUEST = GenerateRequest("poem", ROUTE, Prompt("s", "u"), {}, {})


@dataclass(frozen=True)
class Key:
    credential_id: str

    def open(self) -> str:
        return "sk-theirs"


class Account:
    """A provider that answers by key as `answers` say, and counts the calls."""

    name = "deepseek"

    def __init__(self, answers: dict[str | None, str]) -> None:
        self.answers, self.calls = answers, dict[str | None, int]()

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        who = request.credential.credential_id if request.credential else None
        self.calls[who] = self.calls.get(who, 0) + 1
        if who in self.answers:
            raise CallFailed(self.answers[who], "scripted")
        return GenerateAnswer("{}", "deepseek", "deepseek-flash", 1, 1, 0, False, "stop")


class Ledger:
    def opened(self, route: Route) -> None:
        assert route == ROUTE

    def failed(self, error: JobError) -> None:
        assert error.code


@pytest.fixture
def store() -> MemoryBreakerStore:
    return MemoryBreakerStore()


def run(account: Account, store: MemoryBreakerStore, users: Sequence[str | None]) -> list[str]:
    """Run one job after another, each for the platform (None) or on a user's key; return their ends."""
    gateway = gateway_to(account, breaker=CircuitBreaker(store, 5, 30))
    ends = []
    for user in users:
        asked = REQUEST if user is None else replace(REQUEST, credential=Key(user))
        try:
            gateway.generate(asked, [ROUTE], HandToken(), Ledger())
            ends.append("answered")
        except ProvidersBusy:
            ends.append("sent back")
        except JobError as error:
            ends.append(error.code)
    return ends


def test_exhausted_platform_account_is_called_once_and_then_by_probes_only(store: MemoryBreakerStore) -> None:
    account = Account({None: "PROVIDER_ACCOUNT_EXHAUSTED"})
    assert run(account, store, [None] * 30) == ["PROVIDER_ACCOUNT_EXHAUSTED", *["sent back"] * 29]
    store.advance(300)
    assert run(account, store, [None] * 30) == ["sent back"] * 30, "the probe's own job as well"
    assert account.calls == {None: 2}
    assert run(account, store, ["ana", "bo"]) == ["answered", "answered"]
    account.answers.clear()
    store.advance(300)
    assert run(account, store, [None] * 3) == ["answered"] * 3


def test_exhausted_user_account_fails_only_that_users_jobs(store: MemoryBreakerStore) -> None:
    account = Account({"ana": "CREDENTIAL_INSUFFICIENT_BALANCE"})
    ends = run(account, store, ["ana", None, "bo"] * 10)
    assert ends == ["CREDENTIAL_INSUFFICIENT_BALANCE", "answered", "answered"] * 10
    breaker = CircuitBreaker(store, 5, 30)
    scopes = [scope_of("deepseek", user) for user in (None, "ana", "bo")]
    assert [state.word for state in breaker.states(scopes)] == ["closed"] * 3


@pytest.mark.parametrize("code", ["VALIDATION_OUTPUT_NOT_JSON", "CONTENT_SAFETY_PROVIDER", "PROVIDER_EMPTY_OUTPUT"])
def test_unusable_answer_does_not_open_the_breaker(store: MemoryBreakerStore, code: str) -> None:
    account = Account({None: code})
    assert run(account, store, [None] * 20) == [code] * 20


def test_unavailable_provider_is_called_until_its_breaker_opens(store: MemoryBreakerStore) -> None:
    account = Account({None: "PROVIDER_UNAVAILABLE"})
    assert run(account, store, [None] * 30) == [*["PROVIDER_UNAVAILABLE"] * 5, *["sent back"] * 25]
    assert account.calls == {None: 5}
