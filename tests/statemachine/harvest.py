"""Chooses programs to keep: `python -m tests.statemachine.harvest FIRST LAST > programs.json`.

Plays programs from seeds on SQLite. For each distinct life of a job (its type and history) it keeps the shortest
program, under that life as its name. The most varied lives are kept.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from typing import Any

import structlog

from tests.statemachine.actions import improvise, play
from tests.statemachine.faulty import FaultyDatabase
from tests.statemachine.world import open_world
from tests.support.jobs import prepare_database

KEPT, STEPS = 20, 40


def main(first: int, last: int) -> None:
    """Print the best programs of these seeds as JSON, by name."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    lives: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/harvest.db"
        prepare_database(url)
        database = FaultyDatabase(url)
        for seed in range(first, last):
            with open_world(database) as world:
                invariants = play(world, improvise(seed, STEPS, world))
                acts = list(world.program)
                for life in invariants.lives:
                    if life not in lives or len(acts) < len(lives[life]):
                        lives[life] = acts
        database.dispose()
    # The most different history types first, then the longest history.
    richest = sorted(lives, key=lambda life: (len(set(life.split())), len(life.split())), reverse=True)
    lines = (f"{json.dumps(life)}:{json.dumps(lives[life], separators=(',', ':'))}" for life in sorted(richest[:KEPT]))
    print(f"{len(lives)} lives", file=sys.stderr)
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
