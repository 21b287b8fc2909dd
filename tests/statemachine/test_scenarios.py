"""The scenarios written by hand, on SQLite. `test_replays.py` runs them on every database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.statemachine.actions import play
from tests.statemachine.faulty import FaultyDatabase
from tests.statemachine.scenarios import SCENARIOS
from tests.statemachine.world import open_world
from tests.support.databases import SqliteDatabases
from tests.support.jobs import prepare_database


@pytest.fixture(scope="module")
def database(sqlite: SqliteDatabases) -> Iterator[FaultyDatabase]:
    """Open one database for all scenarios; each one empties it."""
    url = sqlite.create_database(prepare_database)
    opened = FaultyDatabase(url)
    yield opened
    opened.dispose()
    sqlite.drop_database(url)


@pytest.mark.parametrize("sentence", SCENARIOS)
def test_scenario(sentence: str, database: FaultyDatabase) -> None:
    program, lives = SCENARIOS[sentence]
    with open_world(database) as world:
        seen = play(world, program).lives
    assert lives <= seen, f"the lives were {sorted(seen)}"
    assert bool(seen) == bool(lives)
