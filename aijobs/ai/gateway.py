"""The one way from the engine to a provider: the first of the routes that is well, and the next where it fails."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

from aijobs.ai.breaker import CircuitBreaker, scope_of
from aijobs.ai.provider import (
    AiProvider,
    CancellationToken,
    ConstraintRefused,
    GenerateAnswer,
    GenerateRequest,
    Route,
)
from aijobs.ai.slots import CallSlots
from aijobs.errors import JobError, ProvidersBusy

ELSEWHERE = frozenset(
    {
        "PROVIDER_UNAVAILABLE",
        "PROVIDER_RATE_LIMITED",
        "PROVIDER_TIMEOUT",
        "PROVIDER_ACCOUNT_EXHAUSTED",
        "CREDENTIAL_PLATFORM_INVALID",
    }
)
"""Failures after which the next route is tried in the same attempt: nothing was bought, or it was cut off unread."""
EXHAUSTED = frozenset({"PROVIDER_ACCOUNT_EXHAUSTED", "CREDENTIAL_PLATFORM_INVALID"})
"""No call on this key will go through until somebody has seen to the account."""
LESS_STEPS = 2
"""From a schema to any JSON object, and from there to the prompt's word alone."""
SLOT_WAIT_S, SLOT_LOOK_S, SLOT_MARGIN_S = 10.0, 0.2, 60.0
ALL_TAKEN = timedelta(seconds=5)
"""When to come back where all calls that a provider may have at once are taken."""


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
        INTERNAL_CONFIG for a route to no provider, the last provider's own, and what the token and the ledger raise;
        `ProvidersBusy` where none of them is to be asked now.
        """
        waits: list[timedelta] = []
        last: JobError | None = None
        for route in routes:
            token.raise_if_cancelled()
            try:
                return self._through(replace(request, route=route), token, ledger)
            except ProvidersBusy as busy:
                waits.append(busy.wait)
            except JobError as error:
                if error.code not in ELSEWHERE:
                    raise
                last = error
        raise last or ProvidersBusy(min(waits))

    def _through(self, request: GenerateRequest, token: CancellationToken, ledger: CallLedger) -> GenerateAnswer:
        """Ask one provider, if it is well and has a call to spare, and tell its breaker how that went."""
        name = request.route.provider
        provider = self._providers.get(name)
        if provider is None:
            raise JobError("INTERNAL_CONFIG", f"no provider {name!r} is configured")
        if name not in self._servers:
            return self._call(provider, request, token, ledger)
        scope = scope_of(name, request.credential.credential_id if request.credential else None)
        slot = self._take_slot(name, token)
        try:
            if (wait := self._breaker.admit(scope, timedelta(seconds=token.remaining() + SLOT_MARGIN_S))) is not None:
                raise ProvidersBusy(wait)
            return self._watched(scope, provider, request, token, ledger)
        finally:
            self._slots.give_back(name, slot)

    def _watched(
        self,
        scope: str,
        provider: AiProvider,
        request: GenerateRequest,
        token: CancellationToken,
        ledger: CallLedger,
    ) -> GenerateAnswer:
        try:
            answer = self._ask(provider, request, token, ledger)
        except JobError as error:
            self._report(scope, error)
            raise
        except BaseException:
            self._breaker.given_back(scope)
            raise
        self._breaker.succeeded(scope)
        return answer

    def _ask(
        self, provider: AiProvider, request: GenerateRequest, token: CancellationToken, ledger: CallLedger
    ) -> GenerateAnswer:
        """One call; and another where the server takes no such constraint on its answer, which then asks for less."""
        for _ in range(LESS_STEPS):
            with suppress(ConstraintRefused):
                return self._call(provider, request, token, ledger)
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
        if error.code in EXHAUSTED:
            self._breaker.failed(scope, exhausted=True, code=error.code)
        elif error.code == "PROVIDER_EMPTY_OUTPUT" or error.code.startswith(("VALIDATION_", "CONTENT_SAFETY_")):
            self._breaker.succeeded(scope)
        elif error.code.startswith("PROVIDER_"):
            self._breaker.failed(scope, code=error.code)
        else:
            self._breaker.given_back(scope)

    def _take_slot(self, provider: str, token: CancellationToken) -> str:
        """One of the calls that the provider may have at once; waited for a little, as calls are short."""
        limit = self._servers[provider]
        until = time.monotonic() + min(SLOT_WAIT_S, token.remaining())
        while (slot := self._slots.take(provider, limit, token.remaining() + SLOT_MARGIN_S)) is None:
            if time.monotonic() >= until:
                raise ProvidersBusy(ALL_TAKEN)
            token.sleep(SLOT_LOOK_S * (0.5 + random.random()))
        return slot
