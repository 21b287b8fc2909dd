"""Sum the usage and cost of provider calls by job, chain, user, day and other groups.

All numbers are integers. A call without a price is counted as such and never as free. A call that the provider refused
unbilled cost nothing and needs no price. Costs of different currencies are never added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, func, select, tuple_
from sqlalchemy.orm import Session

from aijobs.ai.models import AiUsageLog, CallState
from aijobs.jobs.models import AiJob
from aijobs.monitor.usage_filter import GROUPS, UsageFilter
from aijobs.monitor.views import CallCost, Usage, UsageGroup, UsageTotal

MOST_GROUPS = 400
"""Maximum groups: more than the days of a year; of users and others, the most expensive ones."""

_ENDED = AiUsageLog.state != CallState.STARTED
UNPRICED = and_(_ENDED, AiUsageLog.cost_micros.is_(None), AiUsageLog.billed != "no")
"""The call ended and may have cost something, but the cost is unknown."""


def _number(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)


def _sum(column: Any) -> ColumnElement[int]:
    return func.coalesce(func.sum(column), 0)


_SUMS: Mapping[str, ColumnElement[int]] = {
    "calls": func.count(),
    "failed_calls": _number(AiUsageLog.state.in_((CallState.FAILED, CallState.LOST))),
    "lost_calls": _number(AiUsageLog.state == CallState.LOST),
    "calls_under_way": _number(AiUsageLog.state == CallState.STARTED),
    "prompt_tokens": _sum(AiUsageLog.prompt_tokens),
    "completion_tokens": _sum(AiUsageLog.completion_tokens),
    "cached_tokens": _sum(AiUsageLog.cached_tokens),
    "unpriced_calls": _number(UNPRICED),
    "estimated_calls": _number(AiUsageLog.estimated.is_(True)),
    "possibly_billed_calls": _number(and_(_ENDED, AiUsageLog.billed == "unknown")),
}
_COST = func.sum(AiUsageLog.cost_micros)


def add_up(parts: Iterable[UsageTotal]) -> UsageTotal:
    """Return the sum of sums. Costs of one currency are added."""
    numbers = dict.fromkeys(_SUMS, 0)
    costs: dict[str | None, int] = {}
    for part in parts:
        for name in numbers:
            numbers[name] += getattr(part, name)
        for cost in part.costs:
            costs[cost.currency] = costs.get(cost.currency, 0) + cost.cost_micros
    told = sorted(costs.items(), key=lambda cost: cost[0] or "")
    return UsageTotal(**numbers, costs=tuple(CallCost(currency, micros) for currency, micros in told))


def find_total(session: Session, wanted: UsageFilter) -> UsageTotal:
    """Return the sum of all calls of a filter, in one statement."""
    return _read(session, _calls(wanted)).get((), UsageTotal())


def find_chain_totals(session: Session, root_id: str) -> dict[str, UsageTotal]:
    """Return the sums of each job of a retry chain, by job id, in one statement. Jobs without calls are left out."""
    calls = select().join_from(AiJob, AiUsageLog, AiUsageLog.job_id == AiJob.id).where(AiJob.root_id == root_id)
    return {key[0]: total for key, total in _read(session, calls, AiUsageLog.job_id).items()}


def find_groups(session: Session, wanted: UsageFilter) -> Usage:
    """Return the sums of a filter's groups and their total: days newest first, others most expensive first.

    Two statements, or three with more than `MOST_GROUPS`; the rest is only in the total.
    """
    names, columns = list(GROUPS[wanted.group_by]), list(GROUPS[wanted.group_by].values())
    calls = _calls(wanted)
    keys = _costliest(session, calls, columns)
    shown = keys[:MOST_GROUPS]
    more = len(keys) > len(shown)
    some = calls.where((tuple_(*columns) if len(columns) > 1 else columns[0]).in_(shown)) if more else calls
    found = _read(session, some, *columns)
    if wanted.group_by == "day":
        shown = sorted(found, reverse=True)
    groups = [UsageGroup(found[_texts(key)], **dict(zip(names, _texts(key), strict=True))) for key in shown]
    total = find_total(session, wanted) if more else add_up(found.values())
    return Usage(tuple(groups), total, more)


def _costliest(session: Session, calls: Select[Any], columns: Sequence[Any]) -> list[Any]:
    """Return the most expensive groups, and one more than are shown. Currencies are mixed only for the order."""
    query = calls.add_columns(*columns).group_by(*columns)
    query = query.order_by(func.coalesce(_COST, -1).desc(), *columns).limit(MOST_GROUPS + 1)
    return [tuple(row) if len(columns) > 1 else row[0] for row in session.execute(query)]


def _texts(key: Any) -> tuple[str, ...]:
    return tuple(map(str, key)) if isinstance(key, tuple) else (str(key),)


def _calls(wanted: UsageFilter) -> Select[Any]:
    """Build the query for a filter's calls, without columns. Jobs are joined by key if needed."""
    calls = select().select_from(AiUsageLog)
    if wanted.asks_jobs:
        calls = calls.join(AiJob, AiJob.id == AiUsageLog.job_id)
    return calls.where(*wanted.conditions())


def _read(session: Session, calls: Select[Any], *columns: Any) -> dict[tuple[str, ...], UsageTotal]:
    """Read sums by `columns` and currency, and combine them."""
    parts: dict[tuple[str, ...], list[UsageTotal]] = defaultdict(list)
    by = (*columns, AiUsageLog.currency)
    for *key, currency, cost, in_all in _rows(session, calls.add_columns(*by, _COST, *_SUMS.values()).group_by(*by)):
        numbers = dict(zip(_SUMS, in_all, strict=True))
        costs = () if cost is None else (CallCost(currency, int(cost)),)
        parts[tuple(map(str, key))].append(UsageTotal(**numbers, costs=costs))
    return {key: add_up(sums) for key, sums in parts.items()}


def _rows(session: Session, query: Select[Any]) -> Iterable[tuple[Any, ...]]:
    """Yield each row's columns, then its sums as one tuple of integers, whatever the driver returns."""
    for row in session.execute(query):
        yield (*row[: -len(_SUMS)], [int(value) for value in row[-len(_SUMS) :]])
