"""What a job costs the database: statements, COMMITs and round trips of a create and of an attempt.

A number that grows is a slower product: change it here only with a reason. PostgreSQL begins and commits by round trips
of its own; a statement that is a transaction by itself saves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from sqlalchemy import event

from aijobs.db.database import Database
from tests.integration.engine.stage import CARDS, Stage


@dataclass
class Cost:
    """What was sent to the database. SQLite's BEGIN is one of its statements, which are counted without it."""

    statements: int = 0
    commits: int = 0


@contextmanager
def counted(database: Database) -> Iterator[Cost]:
    cost, engine = Cost(), database.engine

    def statement(_connection: object, _cursor: object, text: str, *_rest: object) -> None:
        cost.statements += not text.startswith("BEGIN")

    def commit(_connection: object) -> None:
        cost.commits += 1

    event.listen(engine, "before_cursor_execute", statement)
    event.listen(engine, "commit", commit)
    try:
        yield cost
    finally:
        event.remove(engine, "before_cursor_execute", statement)
        event.remove(engine, "commit", commit)


BUDGET: dict[str, dict[str, tuple[int, int]]] = {
    # statements and COMMITs: of PostgreSQL, and of the others
    "create": {"postgresql": (2, 1), "other": (6, 1)},
    "create with a key": {"postgresql": (4, 1), "other": (8, 1)},
    "the same request again": {"postgresql": (2, 0), "other": (2, 0)},
    "an attempt without a provider": {"postgresql": (4, 1), "other": (9, 2)},
    "an attempt with a provider": {"postgresql": (13, 3), "other": (20, 4)},
}
"""Without a limit of active jobs, which costs a create one statement."""


@pytest.mark.parametrize("what", BUDGET)
def test_cost_of_a_job_stays_within_its_budget(stage: Stage, what: str) -> None:
    kit = stage.kit
    kit.create(idempotency_key="first")  # It creates the user's row, in a transaction of its own.
    stage.engine.close()  # The watcher asks too.
    work = prepare(stage, what)
    with counted(kit.database) as cost:
        work()
    budget = BUDGET[what]["postgresql" if kit.database.joins_statements else "other"]
    assert (cost.statements, cost.commits) == budget


def prepare(stage: Stage, what: str) -> Callable[[], object]:
    kit = stage.kit
    if what == "create":
        return kit.create
    if what == "create with a key":
        return lambda: kit.create(idempotency_key="k1")
    if what == "the same request again":
        return lambda: kit.create(idempotency_key="first")
    if what == "an attempt without a provider":
        job_id = kit.new_job({"output": {"said": "hello"}, "artifacts": 1}).id
    else:
        job_id = stage.new_cards(stage.asking(CARDS))
    message = stage.message(job_id)
    return lambda: stage.engine.execute(message)
