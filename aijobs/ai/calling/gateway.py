"""Call providers for the engine: the first available route, then the next if it fails."""

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

NEXT_ROUTE_CODES = frozenset(
    {
        "PROVIDER_UNAVAILABLE",
        "PROVIDER_RATE_LIMITED",
        "PROVIDER_TIMEOUT",
        "PROVIDER_ACCOUNT_EXHAUSTED",
        "CREDENTIAL_PLATFORM_INVALID",
    }
)
"""Failures after which the next route is tried in the same attempt: they would be retried anyway, or the account is at
fault. A lost connection and a broken stream are not among them, because their answer may have been billed.
"""
EXHAUSTED = frozenset({"PROVIDER_ACCOUNT_EXHAUSTED", "CREDENTIAL_PLATFORM_INVALID"})
"""No call with this key succeeds until somebody repairs the account."""
MAX_REDUCTIONS = 4
"""Maximum times that a server may refuse part of a request: a kind of constraint, a limit on tokens."""
SLOT_WAIT_S, SLOT_POLL_S, SLOT_MARGIN_S = 3.0, 0.2, 5.0
BUSY_WAIT = timedelta(seconds=10)
"""The wait if all concurrent calls of a provider are in use."""

T = TypeVar("T")


class CallLedger(Protocol):
    """Records each request before it leaves, and its result."""

    def opened(self, route: Route) -> None:
        """Record that a request is about to leave. Raises if it must not: lease lost, or cancel requested."""

    def failed(self, error: JobError) -> None:
        """Record that it failed. Doesn't raise."""


class AiGateway:
    """Sends a request to a provider. `ai.output` reads the answer."""

    def __init__(
        self,
        providers: Iterable[AiProvider],
        servers: Mapping[str, int],
        breaker: CircuitBreaker,
        slots: CallSlots,
    ) -> None:
        """`servers`: maximum concurrent calls of each provider with a server, across all workers (0: no limit). A
        provider that isn't named works in this process, without breaker and slots.
        """
        self._providers = {provider.name: provider for provider in providers}
        self._servers, self._breaker, self._slots = dict(servers), breaker, slots

    def generate(
        self, request: GenerateRequest, routes: Sequence[Route], token: CancellationToken, ledger: CallLedger
    ) -> GenerateAnswer:
        """Return an answer to `request` from the first of `routes` that gives one.

        An unusable answer is returned too, so that its cost is known. Raises `JobError`: INTERNAL_CONFIG for a route to
        an unknown provider, the provider's own errors, and the errors of token and ledger; `ProvidersBusy` if no
        provider is available. If every route fails, it raises the most retryable error.
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
                if error.code not in NEXT_ROUTE_CODES:
                    raise
                outcomes.append(error)
        raise min(outcomes, key=_hope)

    def judge(
        self, moderator: Moderator, texts: Sequence[str], token: CancellationToken, ledger: CallLedger
    ) -> frozenset[str]:
        """Return what a provider's moderation finds in the texts. It is a call on the platform's key, and raises like
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
        """Return how long until a call is worth trying, if the breakers block every route; otherwise None. Takes no
        probe.
        """
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
        """Call a provider if its breaker and its slots allow it, and report the result to the breaker."""
        if name not in self._servers:
            return ask()
        scope = scope_of(name, credential_id)
        if (wait := self._breaker.blocked_for(scope)) is not None:
            raise ProvidersBusy(wait)  # Before waiting for a slot, which a blocked provider doesn't need.
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
            if probing and error.code in NEXT_ROUTE_CODES:
                # A probe: its failure isn't this job's error, but that of all jobs that wait.
                waits = (self._breaker.blocked_for(scope), error.retry_after, BUSY_WAIT)
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
        """Make one call, and another for less if the server refuses part of the request."""
        for _ in range(MAX_REDUCTIONS):
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
            request.credential.open()  # Before the usage row: without a readable key there is no call.
        ledger.opened(request.route)
        try:
            return provider.generate(request, token)
        except JobError as error:
            ledger.failed(error)
            raise

    def _report(self, scope: str, error: JobError) -> None:
        """Report an error to the breaker: failed, succeeded, or nothing about the provider."""
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
        """Take a slot of the provider, and wait for one for a short time."""
        limit = self._servers[provider]
        until = time.monotonic() + min(SLOT_WAIT_S, token.remaining())
        while (slot := self._slots.take(provider, limit, token.remaining() + SLOT_MARGIN_S)) is None:
            if time.monotonic() >= until:
                # The slots may be taken by calls with other keys: that doesn't show that the provider works again.
                (state,) = self._breaker.states([scope])
                raise ProvidersBusy(
                    BUSY_WAIT * (1 + random.random()),
                    crowded=state.word not in (CircuitState.OPEN, CircuitState.HALF_OPEN),
                )
            token.sleep(SLOT_POLL_S * (0.5 + random.random()))
        return slot


def _scope(provider: str, request: GenerateRequest) -> str:
    return scope_of(provider, request.credential.credential_id if request.credential else None)


def _hope(outcome: JobError | ProvidersBusy) -> tuple[int, timedelta]:
    """Return the sort key of an outcome, the most retryable first: a retryable error, the sooner the better; then a
    working provider without a free slot, then one that is unavailable; last a final error.
    """
    if isinstance(outcome, ProvidersBusy):
        return 1 if outcome.crowded else 2, outcome.wait
    tried_again = describe(outcome.code).retried is not Retried.NEVER
    return 0 if tried_again else 3, outcome.retry_after or timedelta()
