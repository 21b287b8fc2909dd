"""The sequences written by hand, on SQLite here; `test_replays.py` runs them on every database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.statemachine.actions import play
from tests.statemachine.faulty import FaultyDatabase
from tests.statemachine.told import TOLD
from tests.statemachine.world import open_world
from tests.support.databases import SqliteDatabases
from tests.support.jobs import prepare_database


@pytest.fixture(scope="module")
def database(sqlite: SqliteDatabases) -> Iterator[FaultyDatabase]:
    """One database for all; each sequence empties it."""
    url = sqlite.create_database(prepare_database)
    opened = FaultyDatabase(url)
    yield opened
    opened.dispose()
    sqlite.drop_database(url)


@pytest.mark.parametrize("sentence", TOLD)
def test_it_is_true_that(sentence: str, database: FaultyDatabase) -> None:
    program, lives = TOLD[sentence]
    with open_world(database) as world:
        seen = play(world, program).lives
    assert lives <= seen, f"the lives were {sorted(seen)}"
    assert bool(seen) == bool(lives)
