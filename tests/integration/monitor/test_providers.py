"""AI providers as operators see them, on each database: breakers, keys as yes or no, and exact sums."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import QueuePool, create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import sessionmaker

from aijobs.ai.calling.breaker import scope_of
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.catalogue import Catalogue
from aijobs.ai.provider import Route
from aijobs.clock import utc_now
from aijobs.db.clock import DatabaseClock
from aijobs.db.database import Database
from aijobs.definitions.definition import PLATFORM_KEY, USER_DEEPSEEK_KEY
from aijobs.errors import ApiError
from aijobs.job_types import flashcard_generation
from aijobs.monitor.monitor import Monitor
from aijobs.monitor.providers import SUMS_S, ProviderReads
from aijobs.monitor.views import CallCost, CallSums
from tests.support.rows import add, build_call, build_job


def call(job: Any, number: int, **changes: Any) -> Any:
    """Return a call that ended just now."""
    values = {"call_no": number, "provider": "acme", "model": "acme-1", "started_at": utc_now()}
    return build_call(job, **{**values, **changes})


def test_provider_shows_whether_it_has_a_key_but_not_the_key(monitor: Monitor) -> None:
    found = monitor.providers()
    rows = [(row.name, row.host, row.key, row.limit, row.in_flight) for row in found.providers]
    assert rows == [
        ("acme", "api.acme.test", "yes", 4, 0),
        ("house", "api.house.test", "not_needed", None, 0),
        ("bare", "api.bare.test", "no", None, 0),
    ]
    assert [model.model for model in found.providers[0].models] == ["acme-1", "acme-2"]
    assert "sk-never-shown" not in repr(found)


def test_todays_calls_are_summed_by_model_and_currency_with_unpriced_calls_apart(
    database: Database, monitor: Monitor
) -> None:
    job = build_job()
    priced = {"currency": "USD", "cost_micros": 150, "prompt_tokens": 10, "completion_tokens": 4}
    unpriced = {"currency": None, "cost_micros": None}
    add(
        database,
        job,
        call(job, 1, latency_ms=100, **priced),
        call(job, 2, latency_ms=900, **priced),
        call(job, 3, latency_ms=300, **{**priced, "currency": "CNY", "cost_micros": 7}),
        call(job, 4, state="failed", error_code="PROVIDER_TIMEOUT", latency_ms=60_000, **unpriced),
        call(job, 5, state="lost", latency_ms=None, **unpriced),
        call(job, 6, state="started", finished_at=None, latency_ms=None, **unpriced),
        call(job, 7, model="acme-2", latency_ms=50, **priced),
        call(job, 8, started_at=utc_now() - timedelta(days=2), latency_ms=1, **priced),
        call(job, 9, provider="gone", model="gone-1", latency_ms=2, **priced),
    )
    acme, _house, _bare, gone = monitor.providers().providers
    sums = {model.model: model.today for model in acme.models}
    first = sums["acme-1"]
    assert (first.calls, first.failed, first.under_way, first.unpriced) == (6, 2, 1, 2)
    assert first.median_ms == 300
    assert {(cost.currency, cost.cost_micros) for cost in first.costs} == {("USD", 300), ("CNY", 7)}
    assert sums["acme-2"].costs == (CallCost("USD", 150),)
    assert sums["acme-2"].median_ms == 50
    assert (gone.name, gone.host, gone.key, gone.in_flight) == ("gone", None, "no", 0)


def test_model_without_calls_has_no_median_and_no_cost(monitor: Monitor) -> None:
    assert monitor.providers().providers[0].models[1].today == CallSums()


def test_running_calls_are_counted_by_slots_if_limited_and_otherwise_by_usage_rows(
    database: Database, monitor: Monitor, providers: ProviderReads
) -> None:
    job = build_job()
    add(
        database,
        job,
        call(job, 1, state="started", finished_at=None),
        call(job, 2, provider="house", model="house-1", state="started", finished_at=None),
    )
    for _ in range(3):
        providers.slots.take("acme", 4, 60)
    acme, house, _ = monitor.providers().providers
    assert (acme.in_flight, acme.limit) == (3, 4)
    assert (house.in_flight, house.limit) == (1, None)


def test_breaker_of_the_platform_is_shown_and_none_of_users(monitor: Monitor, providers: ProviderReads) -> None:
    providers.breaker.failed("acme.platform", exhausted=True)
    providers.breaker.failed("house.cred-1", exhausted=True)
    acme, house, _ = monitor.providers().providers
    assert (acme.breaker.word, acme.breaker.why, acme.breaker.opened) == ("open", "PROVIDER_ACCOUNT_EXHAUSTED", 1)
    assert acme.breaker.open_for == timedelta(seconds=300)
    assert house.breaker.word == "closed"
    assert monitor.get_breaker("acme") == acme.breaker
    with pytest.raises(ApiError) as refused:
        monitor.get_breaker("acme.platform")
    assert refused.value.code == "NOT_FOUND"


def test_provider_sums_take_three_statements_and_are_cached_for_seconds(
    database: Database, monitor: Monitor, providers: ProviderReads, seconds: list[float], statements: Any
) -> None:
    with statements() as seen:
        first = monitor.providers()
        job = build_job()
        add(database, job, call(job, 1))
        sent = len([statement for statement in seen if statement.startswith(("SELECT", "WITH"))])
        assert sent == 3
        seen.clear()
        providers.breaker.failed("acme.platform", exhausted=True)
        providers.slots.take("acme", 4, 60)
        again = monitor.providers()
        assert seen == []
        assert again.read_at == first.read_at
        assert (again.providers[0].breaker.word, again.providers[0].in_flight) == ("open", 1), "Redis is read each time"
        seconds[0] += SUMS_S
        assert monitor.providers().providers[0].models[0].today.calls == 1
        assert len(seen) == 3


def test_redis_is_read_while_no_database_session_is_open(
    database: Database, monitor: Monitor, providers: ProviderReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, held = database.engine.pool, []
    assert isinstance(pool, QueuePool)
    states, in_use = providers.breaker.states, providers.slots.in_use
    monkeypatch.setattr(providers.breaker, "states", lambda scopes: held.append(pool.checkedout()) or states(scopes))
    monkeypatch.setattr(providers.slots, "in_use", lambda *limit: held.append(pool.checkedout()) or in_use(*limit))
    monitor.providers()
    assert held == [0, 0]


def test_failed_provider_sums_are_read_again_at_once(
    sqlite_database: Database, sqlite_monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as away:
        away.setattr(sqlite_database, "_read", sessionmaker(create_engine("sqlite:////nowhere/at/all.db")))
        with pytest.raises(OperationalError):
            sqlite_monitor.providers()
    assert sqlite_monitor.providers().providers


def test_job_on_a_users_own_key_waits_only_for_the_breaker_of_that_key(providers: ProviderReads) -> None:
    router = ModelRouter({"default": (Route("acme", "acme-1"),)}, "default", {USER_DEEPSEEK_KEY: (Route("acme", "m"),)})
    reads = ProviderReads(DatabaseClock(), Catalogue({}, {}, {}), providers.breaker, providers.slots, router)
    providers.breaker.failed(scope_of("acme", "mine"), exhausted=True)
    definition = flashcard_generation.DEFINITION
    (kept,) = reads.find_keeping_back(definition, USER_DEEPSEEK_KEY, "mine")
    assert (kept.scope, kept.word, kept.why) == ("acme.cred-mine", "open", "PROVIDER_ACCOUNT_EXHAUSTED")
    assert reads.find_keeping_back(definition, USER_DEEPSEEK_KEY, "another") == ()
    assert reads.find_keeping_back(definition, PLATFORM_KEY, None) == ()
