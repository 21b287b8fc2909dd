"""The one way from the engine to a provider: the first of the routes that is well, and the next where it fails."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Protocol, TypeVar

from aijobs.ai.calling.breaker import CircuitBreaker, CircuitState, scope_of
from aijobs.ai.calling.slots import CallSlots
from aijobs.ai.errors import ProvidersBusy
from aijobs.ai.provider import (
    AiProvider,
    CallFailed,
    CancellationToken,
    GenerateAnswer,
    GenerateRequest,
    LessWanted,
    Moderator,
    Route,
)
from aijobs.errors import JobError, Retried, describe

ELSEWHERE = frozenset(
    {
        "PROVIDER_UNAVAILABLE",
        "PROVIDER_RATE_LIMITED",
        "PROVIDER_TIMEOUT",
        "PROVIDER_ACCOUNT_EXHAUSTED",
        "CREDENTIAL_PLATFORM_INVALID",
    }
)
"""Failures after which the next route is tried in the same attempt: they would be tried again anyway, or the account is
at fault. A connection that was lost and a stream that broke are not among them: their answer may be on the bill.
"""
EXHAUSTED = frozenset({"PROVIDER_ACCOUNT_EXHAUSTED", "CREDENTIAL_PLATFORM_INVALID"})
"""No call on this key will go through until somebody has seen to the account."""
LESS_STEPS = 4
"""How often a server may say that it takes less than it was asked for: a kind of constraint, a limit on tokens."""
SLOT_WAIT_S, SLOT_LOOK_S, SLOT_MARGIN_S = 3.0, 0.2, 5.0
ALL_TAKEN = timedelta(seconds=10)
"""When to come back where all calls that a provider may have at once are taken."""

T = TypeVar("T")


class CallLedger(Protocol):
    """Who writes down each request before it leaves, and what came of it."""

    def opened(self, route: Route) -> None:
        """A request is about to leave. Raises what keeps it from leaving: a lease that is lost, a cancel."""

    def failed(self, error: JobError) -> None:
        """It gave no answer to use. Doesn't raise."""


class AiGateway:
    """Hands a request to a provider. Reading the answer is `ai.output`'s part."""

    def __init__(
        self,
        providers: Iterable[AiProvider],
        servers: Mapping[str, int],
        breaker: CircuitBreaker,
        slots: CallSlots,
    ) -> None:
        """`servers`: how many calls at once, across all workers, each provider that is a server may have (0: any
        number). One that isn't named works in this process, and needs neither breaker nor slots.
        """
        self._providers = {provider.name: provider for provider in providers}
        self._servers, self._breaker, self._slots = dict(servers), breaker, slots

    def generate(
        self, request: GenerateRequest, routes: Sequence[Route], token: CancellationToken, ledger: CallLedger
    ) -> GenerateAnswer:
        """An answer to `request` from the first of `routes` that gives one.

        An answer that can't be used comes back like any other, so that what it cost is known. Raises `JobError`:
        INTERNAL_CONFIG for a route to no provider, a provider's own, and what the token and the ledger raise;
        `ProvidersBusy` where one that may yet answer is not to be asked now. Of several failures that stands which
        leaves the job most hope.
        """
        outcomes: list[JobError | ProvidersBusy] = []
        for place, route in enumerate(routes, 1):
            token.raise_if_cancelled()
            last = self._is_last(request, routes[place:])
            try:
                return self._through(replace(request, route=route, last_route=last), token, ledger)
            except ProvidersBusy as busy:
                outcomes.append(busy)
            except JobError as error:
                if error.code not in ELSEWHERE:
                    raise
                outcomes.append(error)
        raise min(outcomes, key=_hope)

    def judge(
        self, moderator: Moderator, texts: Sequence[str], token: CancellationToken, ledger: CallLedger
    ) -> frozenset[str]:
        """What a provider's moderation finds in the texts: a call on the platform's key like any other, and raises like
        one.
        """
        route = moderator.moderation_route

        def ask() -> frozenset[str]:
            ledger.opened(route)
            try:
                return moderator.moderate(texts, token)
            except JobError as error:
                ledger.failed(error)
                raise

        return self._guarded(route.provider, None, token, ask)

    def busy_for(self, request: GenerateRequest, routes: Sequence[Route]) -> timedelta | None:
        """How long until it is worth asking, where the breakers keep every route from being asked. It only looks."""
        waits = []
        for route in routes:
            scope = _scope(route.provider, request)
            wait = self._breaker.blocked_for(scope) if route.provider in self._servers else None
            if wait is None:
                return None
            waits.append(wait)
        return min(waits)

    def _is_last(self, request: GenerateRequest, rest: Sequence[Route]) -> bool:
        """Return whether none of `rest` can be asked after this route."""
        return not rest or self.busy_for(request, rest) is not None

    def _through(self, request: GenerateRequest, token: CancellationToken, ledger: CallLedger) -> GenerateAnswer:
        name = request.route.provider
        provider = self._providers.get(name)
        if provider is None:
            raise JobError("INTERNAL_CONFIG", f"no provider {name!r} is configured")
        credential_id = request.credential.credential_id if request.credential else None
        return self._guarded(name, credential_id, token, lambda: self._ask(provider, request, token, ledger))

    def _guarded(self, name: str, credential_id: str | None, token: CancellationToken, ask: Callable[[], T]) -> T:
        """Ask a provider, if it is well and has a call to spare, and tell its breaker how that went."""
        if name not in self._servers:
            return ask()
        scope = scope_of(name, credential_id)
        if (wait := self._breaker.blocked_for(scope)) is not None:
            raise ProvidersBusy(wait)  # Before a slot is waited for, which a provider that isn't asked has no use for.
        slot = self._take_slot(name, scope, token)
        try:
            if (wait := self._breaker.admit(scope)) is not None:
                raise ProvidersBusy(wait)
            return self._watched(scope, ask)
        finally:
            self._slots.release(name, slot)

    def _watched(self, scope: str, ask: Callable[[], T]) -> T:
        probing = self._breaker.is_probing(scope)
        try:
            answer = ask()
        except JobError as error:
            self._report(scope, error)
            if probing and error.code in ELSEWHERE:
                # Picked to find out for all: what it found is no more this job's error than that of the others.
                waits = (self._breaker.blocked_for(scope), error.retry_after, ALL_TAKEN)
                raise ProvidersBusy(max(wait for wait in waits if wait is not None)) from error
            raise
        except BaseException:
            self._breaker.given_back(scope)
            raise
        self._breaker.succeeded(scope)
        return answer

    def _ask(
        self, provider: AiProvider, request: GenerateRequest, token: CancellationToken, ledger: CallLedger
    ) -> GenerateAnswer:
        """One call; and others where the server says what it doesn't take, each of which asks for less."""
        for _ in range(LESS_STEPS):
            try:
                return self._call(provider, request, token, ledger)
            except LessWanted as wanted:
                request = wanted.request
        return self._call(provider, request, token, ledger)

    @staticmethod
    def _call(
        provider: AiProvider, request: GenerateRequest, token: CancellationToken, ledger: CallLedger
    ) -> GenerateAnswer:
        if request.credential is not None:
            request.credential.open()  # Before the row: with a key that can't be read there is no call.
        ledger.opened(request.route)
        try:
            return provider.generate(request, token)
        except JobError as error:
            ledger.failed(error)
            raise

    def _report(self, scope: str, error: JobError) -> None:
        """Tell the breaker what an error says of the provider: unwell, well, or nothing."""
        silent = isinstance(error, CallFailed) and error.silent
        if error.code in EXHAUSTED:
            self._breaker.failed(scope, exhausted=True, code=error.code)
        elif error.code == "PROVIDER_EMPTY_OUTPUT" or error.code.startswith(("VALIDATION_", "CONTENT_SAFETY_")):
            self._breaker.succeeded(scope)
        elif error.code.startswith("PROVIDER_") or silent:
            self._breaker.failed(scope, code=error.code if not silent else "PROVIDER_TIMEOUT")
        else:
            self._breaker.given_back(scope)

    def _take_slot(self, provider: str, scope: str, token: CancellationToken) -> str:
        """One of the calls that the provider may have at once; waited for a little, as calls are short."""
        limit = self._servers[provider]
        until = time.monotonic() + min(SLOT_WAIT_S, token.remaining())
        while (slot := self._slots.take(provider, limit, token.remaining() + SLOT_MARGIN_S)) is None:
            if time.monotonic() >= until:
                # Taken, maybe by calls on other keys, says nothing of a provider that isn't known to be well again.
                (state,) = self._breaker.states([scope])
                raise ProvidersBusy(
                    ALL_TAKEN * (1 + random.random()),
                    crowded=state.word not in (CircuitState.OPEN, CircuitState.HALF_OPEN),
                )
            token.sleep(SLOT_LOOK_S * (0.5 + random.random()))
        return slot


def _scope(provider: str, request: GenerateRequest) -> str:
    return scope_of(provider, request.credential.credential_id if request.credential else None)


def _hope(outcome: JobError | ProvidersBusy) -> tuple[int, timedelta]:
    """By how much an outcome leaves to hope for, the best first: an error that is tried again, the sooner the better;
    then a provider that is well and has no call to spare, then one that may be well later; last what ends the job.
    """
    if isinstance(outcome, ProvidersBusy):
        return 1 if outcome.crowded else 2, outcome.wait
    tried_again = describe(outcome.code).retried is not Retried.NEVER
    return 0 if tried_again else 3, outcome.retry_after or timedelta()
