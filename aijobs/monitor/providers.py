"""AI providers as people see them: their breakers, the calls under way, and what today's calls came to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from aijobs.ai.availability import Prompted
from aijobs.ai.breaker import CLOSED, OPEN, BreakerState, CircuitBreaker, scope_of
from aijobs.ai.catalogue import LOCAL, Catalogue, ProviderConfig
from aijobs.ai.models import DONE, FAILED_CALL, LOST, STARTED, AiUsageLog
from aijobs.ai.router import ModelRouter
from aijobs.ai.slots import CallSlots
from aijobs.db import Clock, read_clock
from aijobs.errors import JobError
from aijobs.monitor.usage import UNPRICED
from aijobs.monitor.views import CallCost, CallSums, ModelRow, ProviderRow, Providers

MOST_LATENCIES = 5000
"""The median is that of so many of the day's newest answers, all models together."""

_Call = tuple[str, str]
"""Provider and model."""


@dataclass(frozen=True)
class ProviderReads:
    """The catalogue beside what Redis says of breakers and slots, and two statements over the day's calls."""

    clock: Clock
    catalogue: Catalogue
    breaker: CircuitBreaker
    slots: CallSlots
    router: ModelRouter

    def read(self, session: Session) -> Providers:
        """Every provider that is configured, then those that were only called today, each with its models."""
        now = read_clock(session, self.clock)
        day = now.replace(hour=0, minute=0, second=0, microsecond=0)
        sums = _find_sums(session, day)
        names = list(self.catalogue.providers)
        names += sorted({provider for provider, _ in sums} - set(names))
        states = {state.scope: state for state in self.breaker.states([scope_of(name) for name in names])}
        rows = [self._row(name, states[scope_of(name)], sums) for name in names]
        return Providers(day=day, read_at=now, providers=tuple(rows))

    def find_state(self, provider: str) -> BreakerState | None:
        """The platform's breaker at a provider that is configured; None for any other."""
        if provider not in self.catalogue.providers:
            return None
        return self.breaker.states([scope_of(provider)])[0]

    def find_keeping_back(
        self, definition: Prompted, credential_mode: str, credential_id: str | None
    ) -> tuple[BreakerState, ...]:
        """The breakers that keep a job's calls back: those of all its routes, where no route is free; else none."""
        if definition.prompt is None:
            return ()
        try:
            routes = self.router.routes(definition, credential_mode)
        except JobError:
            return ()  # Nothing is configured for it: no breaker's fault, and the job's own error says it.
        names = dict.fromkeys(route.provider for route in routes)
        if LOCAL.provider in names:
            return ()
        states = self.breaker.states([scope_of(name, credential_id) for name in names])
        return tuple(states) if all(state.word == OPEN or state.probing for state in states) else ()

    def _row(self, name: str, state: BreakerState, sums: dict[_Call, CallSums]) -> ProviderRow:
        config = self.catalogue.providers.get(name)
        models = list(config.models if config else ())
        models += sorted({model for provider, model in sums if provider == name} - set(models))
        limit = config.max_concurrent_calls if config else 0
        under_way = sum(called.under_way for (provider, _), called in sums.items() if provider == name)
        return ProviderRow(
            name=name,
            host=config.host if config else None,
            key=_key(name, config),
            breaker=state if config else BreakerState(state.scope, CLOSED),
            limit=limit or None,
            in_flight=self.slots.in_use(name, limit) if limit else under_way,
            models=tuple(ModelRow(model, sums.get((name, model), CallSums())) for model in models),
        )


def _key(name: str, config: ProviderConfig | None) -> str:
    if name == LOCAL.provider or (config and not config.needs_key and config.key is None):
        return "not_needed"
    return "yes" if config and config.key is not None else "no"


def _find_sums(session: Session, since: datetime) -> dict[_Call, CallSums]:
    """What calls begun from `since` on came to, by provider and model, in two statements."""
    rows = session.execute(
        select(
            AiUsageLog.provider,
            AiUsageLog.model,
            AiUsageLog.currency,
            func.count(),
            func.sum(case((AiUsageLog.state.in_((FAILED_CALL, LOST)), 1), else_=0)),
            func.sum(case((AiUsageLog.state == STARTED, 1), else_=0)),
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
    """The sums of one model in all currencies; costs of different ones stay apart."""
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
        .where(AiUsageLog.started_at >= since, AiUsageLog.state == DONE, AiUsageLog.latency_ms.is_not(None))
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
