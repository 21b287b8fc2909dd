"""A monitor over each database, with a broker that says what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event

from aijobs.db import Database, DatabaseClock
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.errors import BrokerUnavailable
from aijobs.job_types import synthetic
from aijobs.monitor.monitor import Monitor
from aijobs.queues.presence import WorkerPresence
from aijobs.settings import Settings
from tests.support.rows import prepare_database


class ScriptedBroker:
    """Depths and heartbeats as a test set them; None: away."""

    def __init__(self) -> None:
        self.depth: int | None = 0
        self.beats: list[WorkerPresence] = []

    def pending_count(self, queue_name: str) -> int:
        if self.depth is None:
            raise BrokerUnavailable("away")
        return self.depth

    def read(self) -> list[WorkerPresence]:
        if self.depth is None:
            raise BrokerUnavailable("away")
        return self.beats


@pytest.fixture
def database(create_database: Callable[..., str]) -> Iterator[Database]:
    database = Database(create_database(prepare_database))
    yield database
    database.dispose()


@pytest.fixture
def broker() -> ScriptedBroker:
    return ScriptedBroker()


@pytest.fixture
def monitor(database: Database, broker: ScriptedBroker) -> Monitor:
    registry = JobDefinitionRegistry()
    registry.register_projector(synthetic.PROJECTOR)
    registry.register(synthetic.DEFINITION)
    settings = Settings(secret_key="s" * 32)
    return Monitor(settings, database, DatabaseClock(), registry, broker, broker)


@pytest.fixture
def statements(database: Database) -> Callable[[], Any]:
    """`with statements() as seen:` the SQL that was sent inside."""

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
