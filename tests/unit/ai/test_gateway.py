"""Router and gateway: the order of providers, and a usage row before each call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from aijobs.ai.calling.breaker import CircuitBreaker, scope_of
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.errors import ProvidersBusy
from aijobs.ai.prompts import Prompt
from aijobs.ai.provider import (
    CallFacts,
    CallFailed,
    CancellationToken,
    GenerateAnswer,
    GenerateRequest,
    LessWanted,
    Route,
)
from aijobs.errors import JobError
from aijobs.testing.memory_breaker_store import MemoryBreakerStore
from aijobs.testing.memory_call_slots import MemoryCallSlots
from tests.support.gateways import gateway_to
from tests.support.tokens import HandToken

ONE, TWO = Route("one", "m"), Route("two", "m")
LOCAL, LARGE, OWN = (
    (Route("local", "m"),),
    (Route("deepseek", "large"), Route("local", "m")),
    (Route("deepseek", "own"),),
)
ROUTER = ModelRouter({"default": LOCAL, "large": LARGE}, "default", {"user_deepseek_key": OWN})


@dataclass(frozen=True)
class Type:
    job_type: str = "poem"
    route: str | None = None


@dataclass
class Scripted:
    """A provider that fails with these codes in turn, then answers."""

    name: str
    log: list[str]
    fails: list[str | Exception] = field(default_factory=list)
    asked: list[object] = field(default_factory=list)
    """The terms of each request."""
    last: list[bool] = field(default_factory=list)
    """Whether each request was on the last route."""

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        self.log.append(f"asked {self.name}")
        self.asked.append(request.terms)
        self.last.append(request.last_route)
        if self.fails:
            fault = self.fails.pop(0)
            raise CallFailed(fault, "scripted") if isinstance(fault, str) else fault
        return GenerateAnswer("{}", self.name, request.route.model, 1, 1, 0, True, "length")


@dataclass
class Book:
    """A ledger that writes to the providers' log."""

    log: list[str]

    def opened(self, route: Route) -> None:
        self.log.append(f"opened {route.provider}")

    def failed(self, error: JobError) -> None:
        self.log.append(f"failed {error.code}")


@dataclass(frozen=True)
class Sealed:
    """A user's key, readable or not."""

    credential_id: str = "c1"
    readable: bool = True

    def open(self) -> str:
        if not self.readable:
            raise JobError("CREDENTIAL_UNREADABLE", "scripted")
        return "sk-user"


def request(credential: Sealed | None = None) -> GenerateRequest:
    return GenerateRequest("poem", ONE, Prompt("s", "u"), {}, {}, credential=credential)


def new_breaker(failures: int = 2) -> CircuitBreaker:
    return CircuitBreaker(MemoryBreakerStore(), failures, 30.0, chance=lambda: 0.0)


@pytest.mark.parametrize(
    ("route", "mode", "expected"),
    [
        (None, "platform_key", LOCAL),
        ("large", "platform_key", LARGE),
        (None, "user_deepseek_key", OWN),
        ("large", "user_deepseek_key", OWN),
    ],
)
def test_users_key_never_pays_for_a_route_of_the_platform(
    route: str | None, mode: str, expected: tuple[Route, ...]
) -> None:
    assert ROUTER.routes(Type(route=route), mode) == expected


@pytest.mark.parametrize(("route", "mode"), [("gone", "platform_key"), (None, "user_deepseek_key")])
def test_unconfigured_route_is_a_configuration_error(route: str | None, mode: str) -> None:
    with pytest.raises(JobError, match="INTERNAL_CONFIG"):
        ModelRouter({"default": LOCAL}, "default").routes(Type(route=route), mode)


def test_call_is_recorded_before_it_is_sent() -> None:
    log: list[str] = []
    answer = gateway_to(Scripted("one", log)).generate(request(), (ONE,), HandToken(), Book(log))
    assert log == ["opened one", "asked one"]
    assert answer.finish_reason == "length", "a truncated answer is returned, so that its cost is known"


def test_provider_knows_whether_another_route_is_left() -> None:
    one, two = Scripted("one", [], ["PROVIDER_UNAVAILABLE"]), Scripted("two", [])
    gateway_to(one, two).generate(request(), (ONE, TWO), HandToken(), Book([]))
    assert (one.last, two.last) == ([False], [True])


def test_route_with_an_open_breaker_does_not_count_as_left() -> None:
    one, two, breaker = Scripted("one", []), Scripted("two", []), new_breaker(1)
    breaker.failed(scope_of("two", None), code="PROVIDER_UNAVAILABLE")
    gateway_to(one, two, breaker=breaker).generate(request(), (ONE, TWO), HandToken(), Book([]))
    assert one.last == [True]


def test_cancelled_attempt_makes_and_records_no_call() -> None:
    log: list[str] = []
    with pytest.raises(JobError, match="CANCELLED"):
        gateway_to(Scripted("one", log)).generate(request(), (ONE,), HandToken(0), Book(log))
    assert log == []


def test_route_to_an_unknown_provider_is_a_configuration_error() -> None:
    with pytest.raises(JobError, match="INTERNAL_CONFIG"):
        gateway_to().generate(request(), (ONE,), HandToken(), Book([]))


@pytest.mark.parametrize(
    "code",
    [
        "PROVIDER_UNAVAILABLE",
        "PROVIDER_RATE_LIMITED",
        "PROVIDER_TIMEOUT",
        "PROVIDER_ACCOUNT_EXHAUSTED",
        "CREDENTIAL_PLATFORM_INVALID",
    ],
)
def test_unbilled_failure_is_followed_by_the_next_route(code: str) -> None:
    log: list[str] = []
    gateway = gateway_to(Scripted("one", log, [code]), Scripted("two", log))
    assert gateway.generate(request(), (ONE, TWO), HandToken(), Book(log)).provider == "two"
    assert log == ["opened one", "asked one", f"failed {code}", "opened two", "asked two"]


@pytest.mark.parametrize(
    "code",
    [
        "PROVIDER_CONNECTION_LOST",
        "PROVIDER_STREAM_BROKEN",
        "PROVIDER_EMPTY_OUTPUT",
        "CONTENT_SAFETY_PROVIDER",
        "VALIDATION_INPUT_TOO_LARGE",
        "CREDENTIAL_INVALID",
        "CANCELLED",
        "TIMEOUT",
        "INTERNAL_CONFIG",
    ],
)
def test_possibly_billed_or_permanent_failure_is_not_tried_on_another_route(code: str) -> None:
    log: list[str] = []
    gateway = gateway_to(Scripted("one", log, [code]), Scripted("two", log))
    with pytest.raises(JobError, match=code):
        gateway.generate(request(), (ONE, TWO), HandToken(), Book(log))
    assert "asked two" not in log


LATER = CallFailed("PROVIDER_RATE_LIMITED", "scripted", retry_after=timedelta(seconds=9))
BUSY, FULL = "busy", "full"


@pytest.mark.parametrize(
    ("first", "second", "stands"),
    [
        ("PROVIDER_ACCOUNT_EXHAUSTED", "PROVIDER_UNAVAILABLE", "PROVIDER_UNAVAILABLE"),
        ("PROVIDER_UNAVAILABLE", "PROVIDER_ACCOUNT_EXHAUSTED", "PROVIDER_UNAVAILABLE"),
        ("CREDENTIAL_PLATFORM_INVALID", LATER, "PROVIDER_RATE_LIMITED"),
        (LATER, "PROVIDER_UNAVAILABLE", "PROVIDER_UNAVAILABLE"),
        ("PROVIDER_ACCOUNT_EXHAUSTED", BUSY, BUSY),
        (BUSY, "CREDENTIAL_PLATFORM_INVALID", BUSY),
        (BUSY, "PROVIDER_UNAVAILABLE", "PROVIDER_UNAVAILABLE"),
        (BUSY, FULL, FULL),
        (FULL, BUSY, FULL),
        ("PROVIDER_ACCOUNT_EXHAUSTED", FULL, FULL),
        ("PROVIDER_ACCOUNT_EXHAUSTED", "CREDENTIAL_PLATFORM_INVALID", "PROVIDER_ACCOUNT_EXHAUSTED"),
    ],
)
def test_most_retryable_of_several_failures_is_raised(
    monkeypatch: pytest.MonkeyPatch, first: str | CallFailed, second: str | CallFailed, stands: str
) -> None:
    """An earlier defect: an exhausted account failed jobs that the next provider would have answered a minute later."""
    monkeypatch.setattr("aijobs.ai.calling.gateway.SLOT_WAIT_S", 0.0)
    log, breaker, slots = list[str](), new_breaker(), MemoryCallSlots()
    providers = []
    for name, fault in (("one", first), ("two", second)):
        providers.append(Scripted(name, log, [] if fault in (BUSY, FULL) else [fault]))
        if fault == BUSY:
            breaker.failed(scope_of(name), exhausted=True)
        if fault == FULL:
            slots.take(name, 1, 60)
    with pytest.raises((JobError, ProvidersBusy)) as caught:
        AiGateway(providers, {"one": 1, "two": 1}, breaker, slots).generate(
            request(), (ONE, TWO), HandToken(), Book(log)
        )
    if isinstance(caught.value, ProvidersBusy):
        assert (FULL if caught.value.crowded else BUSY) == stands
    else:
        assert getattr(caught.value, "code", None) == stands


def test_provider_with_an_open_breaker_is_skipped() -> None:
    log, breaker = list[str](), new_breaker()
    breaker.failed(scope_of("one"), exhausted=True)
    gateway = gateway_to(Scripted("one", log), Scripted("two", log), breaker=breaker)
    assert gateway.generate(request(), (ONE, TWO), HandToken(), Book(log)).provider == "two"
    assert log == ["opened two", "asked two"]


def test_job_waits_for_the_first_breaker_if_all_are_open() -> None:
    log, breaker = list[str](), new_breaker()
    breaker.failed(scope_of("one"), exhausted=True)
    for _ in range(2):
        breaker.failed(scope_of("two"))
    with pytest.raises(ProvidersBusy) as busy:
        gateway_to(Scripted("one", log), Scripted("two", log), breaker=breaker).generate(
            request(), (ONE, TWO), HandToken(), Book(log)
        )
    assert timedelta(seconds=25) < busy.value.wait <= timedelta(seconds=30), "the sooner of the two"
    assert log == []


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("PROVIDER_UNAVAILABLE", "open"),
        ("PROVIDER_CONNECTION_LOST", "open"),
        ("PROVIDER_STREAM_BROKEN", "open"),
        ("PROVIDER_RATE_LIMITED", "open"),
        ("VALIDATION_INPUT_TOO_LARGE", "closed"),
        ("CONTENT_SAFETY_PROVIDER", "closed"),
        ("PROVIDER_EMPTY_OUTPUT", "closed"),
        ("CANCELLED", "closed"),
        ("TIMEOUT", "closed"),
        (CallFailed("TIMEOUT", "nothing came", silent=True), "open"),
        ("INTERNAL_CONFIG", "closed"),
    ],
)
def test_only_failures_of_the_provider_open_its_breaker(fault: str | CallFailed, word: str) -> None:
    log, breaker = list[str](), new_breaker()
    gateway = gateway_to(Scripted("one", log, [fault] * 5), breaker=breaker)
    for _ in range(2):
        with pytest.raises(JobError):
            gateway.generate(request(), (ONE,), HandToken(), Book(log))
    assert [state.word for state in breaker.states([scope_of("one")])] == [word]


def test_failures_on_a_users_key_open_no_breaker_of_the_platform() -> None:
    log, breaker = list[str](), new_breaker()
    gateway = gateway_to(Scripted("one", log, ["PROVIDER_UNAVAILABLE"] * 2), breaker=breaker)
    for _ in range(2):
        with pytest.raises(JobError):
            gateway.generate(request(Sealed()), (ONE,), HandToken(), Book(log))
    words = [state.word for state in breaker.states([scope_of("one"), scope_of("one", "c1")])]
    assert words == ["closed", "open"]


def test_unreadable_key_makes_no_call() -> None:
    log: list[str] = []
    with pytest.raises(JobError, match="CREDENTIAL_UNREADABLE"):
        gateway_to(Scripted("one", log)).generate(request(Sealed(readable=False)), (ONE,), HandToken(), Book(log))
    assert log == []


def test_refused_constraint_is_relaxed_step_by_step() -> None:
    log: list[str] = []
    refused = [LessWanted("scripted", CallFacts(), replace(request(), terms=step)) for step in range(5)]
    one = Scripted("one", log, [*refused[:2]])
    assert gateway_to(one).generate(request(), (ONE,), HandToken(), Book(log)).text == "{}"
    assert log.count("opened one") == 3
    assert one.asked == [None, 0, 1], "each call uses what the previous one learned"
    with pytest.raises(JobError, match="INTERNAL_CONFIG"):
        gateway_to(Scripted("one", log, [*refused])).generate(request(), (ONE,), HandToken(), Book(log))


def test_slot_is_released_after_every_failure() -> None:
    log, slots = list[str](), MemoryCallSlots()
    one = Scripted("one", log, ["INTERNAL_CONFIG", RuntimeError("a bug")])
    gateway = AiGateway([one], {"one": 1}, new_breaker(), slots)
    for fault in (JobError, RuntimeError):
        with pytest.raises(fault):
            gateway.generate(request(), (ONE,), HandToken(), Book(log))
        assert slots.in_use("one", 1) == 0


@pytest.mark.parametrize(("failures", "later_s", "crowded"), [(0, 0, True), (1, 0, True), (2, 31, False)])
def test_full_slots_are_an_outage_only_if_the_breaker_is_not_closed(
    monkeypatch: pytest.MonkeyPatch, failures: int, later_s: int, crowded: bool
) -> None:
    """Calls on users' keys fill the slots of a provider while the breaker of the platform's key waits for its probe."""
    monkeypatch.setattr("aijobs.ai.calling.gateway.SLOT_WAIT_S", 0.0)
    log, store, slots = list[str](), MemoryBreakerStore(), MemoryCallSlots()
    breaker = CircuitBreaker(store, 2, 30.0, chance=lambda: 0.0)
    for _ in range(failures):
        breaker.failed(scope_of("one"))
    store.advance(later_s)
    assert slots.take("one", 1, 60) is not None
    gateway = AiGateway([Scripted("one", log)], {"one": 1}, breaker, slots)
    with pytest.raises(ProvidersBusy) as busy:
        gateway.generate(request(), (ONE,), HandToken(), Book(log))
    assert (busy.value.crowded, log) == (crowded, [])


def test_built_in_provider_needs_neither_breaker_nor_slots() -> None:
    log, breaker = list[str](), new_breaker()
    breaker.failed(scope_of("one"), exhausted=True)
    gateway = AiGateway([Scripted("one", log)], {}, breaker, MemoryCallSlots())
    assert gateway.generate(request(), (ONE,), HandToken(), Book(log)).provider == "one"


@pytest.mark.parametrize("code", ["PROVIDER_UNAVAILABLE", "PROVIDER_ACCOUNT_EXHAUSTED"])
def test_job_of_a_failed_probe_is_postponed(code: str) -> None:
    """An earlier defect: each probe during an outage used up one waiting job's attempt."""
    log, store = list[str](), MemoryBreakerStore()
    breaker = CircuitBreaker(store, 1, 30.0, chance=lambda: 0.0)
    gateway = gateway_to(Scripted("one", log, [code]), breaker=breaker)
    breaker.failed(scope_of("one"))
    store.advance(31)
    with pytest.raises(ProvidersBusy) as busy:
        gateway.generate(request(), (ONE,), HandToken(), Book(log))
    assert log == ["opened one", "asked one", f"failed {code}"], "its call has a usage row"
    assert busy.value.wait >= timedelta(seconds=60)
