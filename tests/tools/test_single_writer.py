"""The watch for modules outside the lifecycle that write a job's state, in any way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.support.databases import SqliteDatabases
from tests.support.jobs import Kit, open_kit
from tests.support.scratch import scratch_database
from tests.support.single_writer import SecondWriter, Watch, writes_the_state

IMPORTS = """
from sqlalchemy import insert, text, update
from aijobs.db.statements import change_by, insert_row
from aijobs.jobs.lifecycle.changes import JobChanges
from aijobs.jobs.lifecycle.statements import THE_JOB, of
from aijobs.jobs.models import AiJob
NAME = "_".join(("lifecycle", "status"))
"""
ACT = "def act(database, job_id):\n    def work(session):\n        {line}\n    database.write(work)\n"

WAYS = {
    "a computed name": "session.execute(update(AiJob).values(**{'lifecycle_' + 'status': 'failed'}))",
    "setattr with a variable": "setattr(session.get(AiJob, job_id), NAME, 'failed')",
    "an attribute": "session.get(AiJob, job_id).lifecycle_status = 'failed'",
    "__setattr__": "session.get(AiJob, job_id).__setattr__(NAME, 'failed')",
    "the instance's update": "AiJob(id='x' * 36, **{NAME: 'succeeded'})",
    "SQL as text": "session.execute(text(f'UPDATE ai_jobs SET {NAME} = :s').bindparams(s='failed'))",
    "SQL to the driver": "session.connection().exec_driver_sql(f\"UPDATE ai_jobs SET {NAME} = 'failed'\")",
    "a bulk update": "session.execute(update(AiJob), [{'id': job_id, NAME: 'failed'}])",
    "the table": "session.execute(AiJob.__table__.update().values({NAME: 'failed'}))",
    "an insert": "session.execute(insert(AiJob).values(id='y' * 36, **{NAME: 'failed'}))",
    "a kept statement": "change_by(session, AiJob, THE_JOB, of=of(job_id), **{NAME: 'failed'})",
    "a kept row": "insert_row(session, AiJob, id='z' * 36, **{NAME: 'failed'})",
    "the repository's own method": "JobChanges(*[None] * 5)._change(session, job_id, **{NAME: 'failed'})",
}


@pytest.fixture
def sqlite_kit(sqlite: SqliteDatabases) -> Iterator[Kit]:
    with open_kit(scratch_database(sqlite)) as kit:
        yield kit


@pytest.fixture
def write_as_product(sqlite_kit: Kit) -> Callable[[str], None]:
    """Return a function that runs a line of code as a product module, in a transaction with `session` and `job_id`."""
    kit = sqlite_kit
    job_id = kit.new_job().id

    def write(line: str) -> None:
        module: Any = ModuleType("aijobs.web.sample")
        exec(IMPORTS + ACT.replace("{line}", line), module.__dict__)
        module.act(kit.database, job_id)

    return write


@pytest.mark.parametrize("way", WAYS)
def test_second_writer_is_caught(write_as_product: Callable[[str], None], single_writer: Watch, way: str) -> None:
    with pytest.raises(SecondWriter, match=r"aijobs\.web\.sample writes lifecycle_status"):
        write_as_product(WAYS[way])
    assert single_writer.take()


@pytest.mark.parametrize(
    "line",
    [
        "session.get(AiJob, job_id).progress = 5",
        "session.execute(update(AiJob).where(AiJob.lifecycle_status == 'queued').values(progress=5))",
        'session.execute(text("SELECT lifecycle_status FROM ai_jobs"))',
        "change_by(session, AiJob, THE_JOB, AiJob.lifecycle_status == 'queued', of=of(job_id), progress=5)",
    ],
)
def test_write_of_another_column_is_not_caught(write_as_product: Callable[[str], None], line: str) -> None:
    write_as_product(line)


def test_repository_and_tests_may_write_the_state(sqlite_kit: Kit) -> None:
    job_id, _ = sqlite_kit.job_in("failed")
    sqlite_kit.set(job_id, lifecycle_status="queued")
    assert sqlite_kit.job(job_id).lifecycle_status == "queued"


@pytest.mark.parametrize(
    ("statement", "writes"),
    [
        ("UPDATE ai_jobs SET progress=?, lifecycle_status=? WHERE id = ?", True),
        ("UPDATE `ai_jobs` SET `lifecycle_status`=%s", True),
        ('update "ai_jobs" set\n"lifecycle_status" = $1', True),
        ("UPDATE ai_jobs, x SET ai_jobs.lifecycle_status = 'failed'", True),
        ("INSERT INTO ai_jobs (id, lifecycle_status) VALUES (?, ?)", True),
        ("REPLACE INTO ai_jobs (lifecycle_status) VALUES (1)", True),
        ("UPDATE ai_jobs SET progress=? WHERE lifecycle_status = 'queued'", False),
        ("INSERT INTO ai_job_events (type) SELECT lifecycle_status FROM ai_jobs", False),
        ("SELECT lifecycle_status FROM ai_jobs", False),
    ],
)
def test_statement_counts_as_a_write_only_if_it_sets_the_column(statement: str, writes: bool) -> None:
    assert writes_the_state(statement) is writes
