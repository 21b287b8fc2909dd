"""Services over each database, with a clock that stands still, or the database's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aijobs.db.clock import ManualClock
from tests.support.databases import Databases, SqliteDatabases
from tests.support.jobs import BEGIN, Kit, open_kit
from tests.support.scratch import scratch_database


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of work that is tried again waits for nothing that a test would have to see."""
    monkeypatch.setattr("aijobs.db.database.FIRST_PAUSE_S", 0.002)


@pytest.fixture
def kit(database_server: Databases) -> Iterator[Kit]:
    """Services over each database in turn; the clock stands still until it is moved."""
    with open_kit(scratch_database(database_server), clock=ManualClock(BEGIN)) as kit:
        yield kit


@pytest.fixture
def live_kit(database_server: Databases) -> Iterator[Kit]:
    """As `kit`, judged by the database's own clock."""
    with open_kit(scratch_database(database_server)) as kit:
        yield kit


@pytest.fixture
def sqlite_kit(sqlite: SqliteDatabases) -> Iterator[Kit]:
    """As `kit`, for what has nothing to do with the kind of database."""
    with open_kit(scratch_database(sqlite), clock=ManualClock(BEGIN)) as kit:
        yield kit
