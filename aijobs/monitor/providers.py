"""Read AI providers for people: breakers, running calls, and sums of today's calls."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from aijobs.ai.calling.breaker import BreakerState, CircuitBreaker, CircuitState, scope_of
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.calling.slots import CallSlots
from aijobs.ai.catalogue import LOCAL, Catalogue, ProviderConfig
from aijobs.ai.models import AiUsageLog, CallState
from aijobs.db.clock import Clock, read_clock
from aijobs.db.database import Database
from aijobs.definitions.definition import JobDefinition
from aijobs.errors import JobError
from aijobs.forks import new_lock
from aijobs.monitor.usage import UNPRICED
from aijobs.monitor.views import CallCost, CallSums, ModelRow, ProviderRow, Providers

MOST_LATENCIES = 5000
"""The median is of so many of the day's newest answers, all models together."""

SUMS_S = 4.0
"""How long the day's sums are cached: each open tab asks for them every few seconds."""

_Call = tuple[str, str]
"""Provider and model."""


@dataclass(frozen=True)
class _Day:
    """The sums of the day's calls, when they were read, and when the day began."""

    read_at: datetime
    begins: datetime
    sums: Mapping[_Call, CallSums]


class ProviderReads:
    """Combines the catalogue with breakers and slots in Redis, and with sums of the day's calls.

    Breakers and slots are read each time. The sums are cached for `SUMS_S`.
    """

    def __init__(
        self,
        clock: Clock,
        catalogue: Catalogue,
        breaker: CircuitBreaker,
        slots: CallSlots,
        router: ModelRouter,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.breaker, self.slots = breaker, slots
        self._clock, self._catalogue, self._router, self._monotonic = clock, catalogue, router, monotonic
        self._guard = new_lock()
        self._day: _Day | None = None
        self._until, self._asking = 0.0, False

    def read(self, database: Database) -> Providers:
        """Return every configured provider, then those that were called today, each with its models.

        Redis is asked before a session is opened, so that no connection waits while it doesn't answer.
        """
        configured = self._catalogue.providers
        states = dict(zip(configured, self.breaker.states([scope_of(name) for name in configured]), strict=True))
        limits = {name: config.max_concurrent_calls for name, config in configured.items()}
        in_use = {name: self.slots.in_use(name, limit) for name, limit in limits.items() if limit}
        day = self._read_day(database)
        names = [*configured, *sorted({provider for provider, _ in day.sums} - set(configured))]
        rows = [
            self._row(
                name, states.get(name) or BreakerState(scope_of(name), CircuitState.CLOSED), in_use.get(name), day.sums
            )
            for name in names
        ]
        return Providers(day=day.begins, read_at=day.read_at, providers=tuple(rows), routes=self._routes())

    def _read_day(self, database: Database) -> _Day:
        """Return the day's sums: the cached ones while they are young, or while another thread reads new ones."""
        with self._guard:
            if self._day is not None and (self._asking or self._monotonic() < self._until):
                return self._day
            self._asking = True
        try:
            with database.read() as session:
                now = read_clock(session, self._clock)
                begins = now.replace(hour=0, minute=0, second=0, microsecond=0)
                day = _Day(now, begins, _find_sums(session, begins))
            with self._guard:
                self._day, self._until = day, self._monotonic() + SUMS_S
        finally:
            with self._guard:
                self._asking = False
        return day

    def find_state(self, provider: str) -> BreakerState | None:
        """Return the platform's breaker of a configured provider; None for any other."""
        if provider not in self._catalogue.providers:
            return None
        return self.breaker.states([scope_of(provider)])[0]

    def find_keeping_back(
        self, definition: JobDefinition, credential_mode: str, credential_id: str | None
    ) -> tuple[BreakerState, ...]:
        """Return the breakers that block a job's calls: of all its routes if none is free, otherwise none."""
        if definition.prompt is None:
            return ()
        try:
            routes = self._router.routes(definition, credential_mode)
        except JobError:
            return ()  # No route is configured: that isn't a breaker's fault, and the job's own error says it.
        names = dict.fromkeys(route.provider for route in routes)
        if LOCAL.provider in names:
            return ()
        states = self.breaker.states([scope_of(name, credential_id) for name in names])
        return tuple(states) if all(state.word == CircuitState.OPEN or state.probing for state in states) else ()

    def _routes(self) -> dict[str, tuple[str, ...]]:
        routes = {**self._catalogue.routes, **self._catalogue.user_routes}
        return {name: tuple(f"{route.provider}/{route.model}" for route in steps) for name, steps in routes.items()}

    def _row(self, name: str, state: BreakerState, in_use: int | None, sums: Mapping[_Call, CallSums]) -> ProviderRow:
        config = self._catalogue.providers.get(name)
        models = list(config.models if config else ())
        models += sorted({model for provider, model in sums if provider == name} - set(models))
        under_way = sum(called.under_way for (provider, _), called in sums.items() if provider == name)
        return ProviderRow(
            name=name,
            host=config.host if config else None,
            key=_key(name, config),
            breaker=state,
            limit=(config.max_concurrent_calls or None) if config else None,
            in_flight=under_way if in_use is None else in_use,
            models=tuple(ModelRow(model, sums.get((name, model), CallSums())) for model in models),
        )


def _key(name: str, config: ProviderConfig | None) -> str:
    if name == LOCAL.provider or (config and not config.needs_key and config.key is None):
        return "not_needed"
    return "yes" if config and config.key is not None else "no"


def _find_sums(session: Session, since: datetime) -> dict[_Call, CallSums]:
    """Return the sums of calls since `since`, by provider and model, in two statements."""
    rows = session.execute(
        select(
            AiUsageLog.provider,
            AiUsageLog.model,
            AiUsageLog.currency,
            func.count(),
            func.sum(case((AiUsageLog.state.in_((CallState.FAILED, CallState.LOST)), 1), else_=0)),
            func.sum(case((AiUsageLog.state == CallState.STARTED, 1), else_=0)),
            func.coalesce(func.sum(AiUsageLog.prompt_tokens), 0),
            func.coalesce(func.sum(AiUsageLog.completion_tokens), 0),
            func.sum(AiUsageLog.cost_micros),
            func.sum(case((UNPRICED, 1), else_=0)),
        )
        .where(AiUsageLog.started_at >= since)
        .group_by(AiUsageLog.provider, AiUsageLog.model, AiUsageLog.currency)
        .order_by(AiUsageLog.currency)
    )
    found: dict[_Call, list[CallSums]] = defaultdict(list)
    for provider, model, currency, calls, failed, under_way, prompt, completion, cost, unpriced in rows:
        found[provider, model].append(
            CallSums(
                calls=int(calls),
                failed=int(failed),
                under_way=int(under_way),
                prompt_tokens=int(prompt),
                completion_tokens=int(completion),
                unpriced=int(unpriced),
                costs=() if cost is None else (CallCost(currency, int(cost)),),
            )
        )
    medians = _find_medians(session, since)
    return {call: _added(parts, medians.get(call)) for call, parts in found.items()}


def _added(parts: Sequence[CallSums], median_ms: int | None) -> CallSums:
    """Return the sums of one model in all currencies. Costs of different ones stay separate."""
    return CallSums(
        calls=sum(part.calls for part in parts),
        failed=sum(part.failed for part in parts),
        under_way=sum(part.under_way for part in parts),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        unpriced=sum(part.unpriced for part in parts),
        median_ms=median_ms,
        costs=tuple(cost for part in parts for cost in part.costs),
    )


def _find_medians(session: Session, since: datetime) -> dict[_Call, int]:
    newest = (
        select(AiUsageLog.provider, AiUsageLog.model, AiUsageLog.latency_ms)
        .where(AiUsageLog.started_at >= since, AiUsageLog.state == CallState.DONE, AiUsageLog.latency_ms.is_not(None))
        .order_by(AiUsageLog.started_at.desc())
        .limit(MOST_LATENCIES)
        .subquery()
    )
    one = (newest.c.provider, newest.c.model)
    ranked = select(
        *one,
        newest.c.latency_ms,
        func.row_number().over(partition_by=one, order_by=newest.c.latency_ms).label("place"),
        func.count().over(partition_by=one).label("many"),
    ).subquery()
    middle = select(ranked.c.provider, ranked.c.model, func.max(ranked.c.latency_ms)).where(
        2 * ranked.c.place <= ranked.c.many + 1
    )
    return {
        (provider, model): int(latency)
        for provider, model, latency in session.execute(middle.group_by(ranked.c.provider, ranked.c.model))
    }
