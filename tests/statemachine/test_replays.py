"""Kept programs and new ones from seeds, on PostgreSQL, MariaDB and SQLite."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.statemachine.actions import Program, improvise, play
from tests.statemachine.faulty import FaultyDatabase
from tests.statemachine.scenarios import SCENARIOS
from tests.statemachine.world import open_world
from tests.support.jobs import prepare_database

PROGRAMS: dict[str, Program] = json.loads(Path(__file__).with_name("programs.json").read_text())
"""Programs by the life of one of their jobs. Each is a list of [action, values]; `harvest.py` chooses them."""


@pytest.fixture
def database(create_database: Callable[..., str]) -> Iterator[FaultyDatabase]:
    """Open a database with injected commit failures, of each kind."""
    opened = FaultyDatabase(create_database(prepare_database))
    yield opened
    opened.dispose()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_scenario_keeps_the_promises_on_every_database(database: FaultyDatabase) -> None:
    for sentence, (program, lives) in SCENARIOS.items():
        with open_world(database) as world:
            seen = play(world, program).lives
        assert lives <= seen, f"{sentence}: the lives were {sorted(seen)}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_kept_program_keeps_the_promises_on_every_database(database: FaultyDatabase) -> None:
    for life, program in PROGRAMS.items():
        with open_world(database) as world:
            lives = play(world, program).lives
        # A changed product may turn a program into one that tests nothing: choose new programs then.
        assert life in lives, f"none of {sorted(lives)} is {life}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_programs_from_seeds_keep_the_promises_on_every_database(database: FaultyDatabase) -> None:
    for seed in range(1_000, 1_030):
        with open_world(database) as world:
            play(world, improvise(seed, 50, world))
