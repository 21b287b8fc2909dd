"""Query plans of `aijobs check`: it uses indexes, and scans no table twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import delete, func, select

from aijobs.db.clock import DatabaseClock
from aijobs.db.database import Base, Database
from aijobs.jobs.models import AiJob, AiJobArtifact
from aijobs.jobs.status import FINAL
from aijobs.monitor.check import Check
from aijobs.monitor.check_rules import RULES, Rule
from bench.check_speed import find_scans
from bench.many_jobs import TABLES, seed
from tests.support.rows import prepare_database

READS = {
    "has no enqueue event": ("ai_jobs",),
    "has an enqueue event but no row": ("outbox_events",),
    "changed after its end": ("ai_job_events",),
    "is neither ended nor going on": (),
    "ended without its end event": (),
    "has history of two attempts mixed": ("ai_job_events",),
    "was written to by another than the holder of the attempt": ("ai_job_events",),
    "has another number of artifacts than its projection made": ("ai_jobs",),
    "has an event that should have been sent long ago": (),
    "has an event that a dispatcher took long ago and left lying": (),
    "has a lease that ran out long ago": (),
    "waits, and nothing asks for its next attempt": (),
    "was asked to cancel and did not end so": ("ai_jobs",),
    "is cancelled and nobody asked": (),
    "asked the provider again with a saved answer": ("ai_job_events",),
    "is a retry that bought what its parent had saved": (),
    "made a provider call that has no usage row": ("ai_job_events",),
    "has a usage row that no call stands for": ("ai_usage_logs",),
    "has a usage row that was never closed": (),
    "repeats a deleted job's key": ("job_tombstones",),
    "has gaps in its history": ("ai_jobs",),
    "has a history that begins otherwise than with its creation": ("ai_job_events",),
    "stands otherwise than its history says": ("ai_jobs",),
}
"""Tables that each rule must scan, because no index finds what it looks for."""


@pytest.fixture
def database(create_sqlite_database: Callable[..., str]) -> Iterator[Database]:
    database = Database(create_sqlite_database(prepare_database))
    yield database
    database.dispose()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.what)
def test_rule_scans_no_table_that_has_a_suitable_index(database: Database, rule: Rule) -> None:
    assert find_scans(database, rule) == READS[rule.what]


def test_nested_scan_is_detected(database: Database) -> None:
    cross = select(AiJob.id).where(AiJob.progress == 1, AiJobArtifact.ordinal == 2)
    assert find_scans(database, Rule(1, "everything with everything", lambda clock, bounds: cross)) == (
        "ai_job_artifacts",
        "ai_jobs",
    )


def test_seeded_jobs_of_the_benchmark_are_sound(database: Database) -> None:
    seed(database, 200)
    report = Check(database, DatabaseClock(), None).run()
    assert (report.findings, report.jobs) == ((), 200)
    with database.transaction() as session:
        states = dict(
            session.execute(select(AiJob.lifecycle_status, func.count()).group_by(AiJob.lifecycle_status)).all()
        )
        assert states == {"succeeded": 190, "failed": 4, "cancelled": 2, "running": 2, "queued": 2}
        assert set(states) > FINAL
        for table in (Base.metadata.tables[name] for name in TABLES):
            assert session.execute(select(func.count()).select_from(table)).scalar_one() >= 190
        session.execute(delete(AiJobArtifact))
    (finding,) = Check(database, DatabaseClock(), None).run().findings
    assert finding.count == 190


def test_copied_jobs_of_the_benchmark_are_sound(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.many_jobs.TEMPLATE", 100)
    seed(database, 300)
    report = Check(database, DatabaseClock(), None).run()
    assert (report.findings, report.jobs) == ((), 300)
