"""Fixtures: a monitor over each database, with a scripted broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event

from aijobs.ai.calling.breaker import CircuitBreaker
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.catalogue import Catalogue, ProviderConfig
from aijobs.ai.provider import Route
from aijobs.db.clock import DatabaseClock
from aijobs.db.database import Database
from aijobs.definitions.definition import QUEUES
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.errors import BrokerUnavailable
from aijobs.job_types import synthetic
from aijobs.monitor.monitor import Monitor
from aijobs.monitor.providers import ProviderReads
from aijobs.queues.presence import WorkerPresence
from aijobs.queues.state import AWAY, OK, BrokerState, QueueState
from aijobs.settings import Settings
from aijobs.testing.memory_breaker_store import MemoryBreakerStore
from aijobs.testing.memory_call_slots import MemoryCallSlots
from tests.support.databases import Databases, SqliteDatabases
from tests.support.scratch import open_database, scratch_database


class ScriptedBroker:
    """A broker with depths and heartbeats set by a test; with depth None it is unreachable."""

    def __init__(self) -> None:
        self.depth: int | None = 0
        self.state, self.cause = OK, None
        self.beats: list[WorkerPresence] = []

    def probe(self) -> BrokerState:
        if self.depth is None:
            return BrokerState(AWAY, "away")
        queues = {name: QueueState(self.state, self.cause, self.depth) for name in QUEUES}
        return BrokerState(self.state, self.cause, queues)

    def read(self) -> list[WorkerPresence]:
        if self.depth is None:
            raise BrokerUnavailable("away")
        return self.beats


@pytest.fixture
def database(database_server: Databases) -> Iterator[Database]:
    with open_database(scratch_database(database_server)) as database:
        yield database


@pytest.fixture
def broker() -> ScriptedBroker:
    return ScriptedBroker()


@pytest.fixture
def seconds() -> list[float]:
    """The monotonic time of the providers' reads; a test may change the one number."""
    return [1000.0]


@pytest.fixture
def providers(seconds: list[float]) -> ProviderReads:
    """Providers `acme` (limit of four calls, with a key), `house` (needs no key) and `bare` (no key)."""
    acme = _provider("acme", key="sk-never-shown", models=("acme-1", "acme-2"), max_concurrent_calls=4)
    house = _provider("house", needs_key=False)
    catalogue = Catalogue({"acme": acme, "house": house, "bare": _provider("bare")}, {}, {})
    breaker = CircuitBreaker(MemoryBreakerStore(), failures=3, open_s=30)
    router = ModelRouter({"default": (Route("acme", "acme-1"), Route("house", "house-1"))}, "default")
    return ProviderReads(DatabaseClock(), catalogue, breaker, MemoryCallSlots(), router, monotonic=lambda: seconds[0])


def _provider(name: str, **changes: Any) -> ProviderConfig:
    values: dict[str, Any] = {
        "name": name,
        "base_url": f"https://api.{name}.test/v1",
        "models": (f"{name}-1",),
        "json_mode": "json_object",
        "key": None,
        "needs_key": True,
        "prices_as": name,
        "tokens_name": "max_tokens",
        "max_output_tokens": None,
        "context_tokens": None,
        "max_concurrent_calls": 0,
        "moderation_model": None,
        "connect_s": 5,
        "first_data_s": 120,
        "idle_s": 30,
    }
    return ProviderConfig(**{**values, **changes})


@pytest.fixture
def monitor(database: Database, broker: ScriptedBroker, providers: ProviderReads) -> Monitor:
    return _monitor(database, broker, providers)


@pytest.fixture
def sqlite_database(sqlite: SqliteDatabases) -> Iterator[Database]:
    with open_database(scratch_database(sqlite)) as database:
        yield database


@pytest.fixture
def sqlite_monitor(sqlite_database: Database, broker: ScriptedBroker, providers: ProviderReads) -> Monitor:
    return _monitor(sqlite_database, broker, providers)


def _monitor(database: Database, broker: ScriptedBroker, providers: ProviderReads) -> Monitor:
    registry = JobDefinitionRegistry()
    registry.register_projector(synthetic.PROJECTOR)
    registry.register(synthetic.DEFINITION)
    settings = Settings(secret_key="s" * 32)
    return Monitor(settings, database, DatabaseClock(), registry, broker, broker, providers)


@pytest.fixture
def statements(database: Database) -> Callable[[], Any]:
    """`with statements() as seen:` collects the SQL statements of the block."""

    @contextmanager
    def recording() -> Iterator[list[str]]:
        seen: list[str] = []

        def executed(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            if not statement.startswith(("BEGIN", "PRAGMA")):
                seen.append(statement)

        event.listen(database.engine, "before_cursor_execute", executed)
        try:
            yield seen
        finally:
            event.remove(database.engine, "before_cursor_execute", executed)

    return recording


@pytest.fixture
def plans(sqlite_database: Database) -> Callable[[], Any]:
    """`with plans() as seen:` collects SQLite's query plan steps of the block."""

    @contextmanager
    def recording() -> Iterator[list[str]]:
        seen: list[str] = []

        def executed(_connection: Any, cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
            if statement.startswith("SELECT"):
                plan = cursor.connection.cursor().execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
                seen.extend(row[3] for row in plan.fetchall())

        event.listen(sqlite_database.engine, "before_cursor_execute", executed)
        try:
            yield seen
        finally:
            event.remove(sqlite_database.engine, "before_cursor_execute", executed)

    return recording
