"""Chooses programs worth keeping: `python -m tests.statemachine.harvest FIRST LAST > programs.json`.

Plays programs from seeds on SQLite. One whose jobs had a life (their history, word by word) that no kept program has
is kept under the name of that life, the richest lives first.
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
    """Print the programs of these seeds that are worth keeping, by name."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    lives: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/harvest.db"
        prepare_database(url)
        database = FaultyDatabase(url)
        for seed in range(first, last):
            with open_world(database) as world:
                beliefs = play(world, improvise(seed, STEPS, world))
                acts = list(world.program)
                for life in beliefs.lives:
                    if life not in lives or len(acts) < len(lives[life]):
                        lives[life] = acts
        database.dispose()
    # A word that few lives have makes a life rich, and so does each change of hands.
    richest = sorted(lives, key=lambda life: (len(set(life.split())), len(life.split())), reverse=True)
    lines = (f"{json.dumps(life)}:{json.dumps(lives[life], separators=(',', ':'))}" for life in sorted(richest[:KEPT]))
    print(f"{len(lives)} lives", file=sys.stderr)
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
