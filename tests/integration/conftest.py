"""Fixtures: services over each database, with a manual clock or the database's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aijobs.db.clock import ManualClock
from tests.support.databases import Databases, SqliteDatabases
from tests.support.jobs import BEGIN, Kit, open_kit
from tests.support.scratch import scratch_database


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between repeats of a unit of work."""
    monkeypatch.setattr("aijobs.db.database.FIRST_PAUSE_S", 0.002)


@pytest.fixture
def kit(database_server: Databases) -> Iterator[Kit]:
    """Services over each database in turn, with a clock that stands until a test advances it."""
    with open_kit(scratch_database(database_server), clock=ManualClock(BEGIN)) as kit:
        yield kit


@pytest.fixture
def live_kit(database_server: Databases) -> Iterator[Kit]:
    """Like `kit`, with the database's own clock."""
    with open_kit(scratch_database(database_server)) as kit:
        yield kit


@pytest.fixture
def sqlite_kit(sqlite: SqliteDatabases) -> Iterator[Kit]:
    """Like `kit`, for tests that don't depend on the kind of database."""
    with open_kit(scratch_database(sqlite), clock=ManualClock(BEGIN)) as kit:
        yield kit
