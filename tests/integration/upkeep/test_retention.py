"""Retention: it deletes old jobs with their rows, chains as a whole, and leaves tombstones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import Column, ForeignKey, MetaData, Table, insert, update
from structlog.testing import capture_logs

from aijobs.db.database import Key
from aijobs.errors import ApiError
from aijobs.monitor.check import Check
from aijobs.outbox.models import OutboxEvent
from aijobs.upkeep.retention import Pruned, Retention
from tests.support.jobs import Kit, race

DAY = 86_400
HANGING = ("ai_job_snapshots", "ai_job_events", "ai_job_artifacts", "ai_usage_logs", "outbox_events")


def retention(kit: Kit, batch: int = 50) -> Retention:
    return Retention(
        kit.database,
        kit.clock,
        keep_jobs=timedelta(days=180),
        keep_tombstones=timedelta(days=365),
        keep_sessions=timedelta(days=8),
        batch=batch,
    )


def job_ids(kit: Kit) -> set[str]:
    return {row["id"] for row in kit.rows("ai_jobs")}


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_old_job_is_deleted_with_its_rows_after_180_days(kit: Kit, state: str) -> None:
    job_id, _ = kit.job_in(state)
    kit.advance(180 * DAY - 1)
    assert retention(kit).run() == Pruned(0, 0)
    assert job_ids(kit) == {job_id}
    kit.advance(1)
    assert retention(kit).run() == Pruned(1, 0)
    assert job_ids(kit) == set()
    assert {table: kit.rows(table) for table in HANGING} == {table: [] for table in HANGING}


def test_dead_event_is_deleted_with_its_job(kit: Kit) -> None:
    job_id, _ = kit.job_in("failed")
    with kit.database.transaction() as session:
        session.execute(update(OutboxEvent).values(status="dead", attempt_count=3))
    kit.advance(180 * DAY - 1)
    assert retention(kit).run() == Pruned(0, 0)
    assert [event.status for event in kit.events(job_id)] == ["dead", "dead"]
    kit.advance(1)
    assert retention(kit).run() == Pruned(1, 0)
    assert kit.rows("outbox_events") == []


@pytest.mark.parametrize("state", ["queued", "running", "retrying", "cancel_requested"])
def test_open_job_is_kept(kit: Kit, state: str) -> None:
    job_id, _ = kit.job_in(state)
    kit.advance(1000 * DAY)
    assert retention(kit).run() == Pruned(0, 0)
    assert job_ids(kit) == {job_id}


def test_chain_is_deleted_as_a_whole_when_its_newest_job_is_old_enough(kit: Kit) -> None:
    parent, _ = kit.job_in("failed")
    kit.advance(100 * DAY)
    child = kit.jobs.retry(parent, "operator:o").job.id
    kit.advance(100 * DAY)
    assert retention(kit).run() == Pruned(0, 0), "the child is still open"
    kit.jobs.cancel(child, "user:u")
    kit.advance(179 * DAY)
    assert retention(kit).run() == Pruned(0, 0), "the child ended a short while ago"
    assert job_ids(kit) == {parent, child}
    kit.advance(DAY)
    assert retention(kit).run() == Pruned(2, 0)
    assert job_ids(kit) == set()


def test_repeat_of_a_deleted_request_is_refused_until_its_tombstone_is_deleted(kit: Kit) -> None:
    job_id = kit.new_job(idempotency_key="k").id
    kit.jobs.cancel(job_id, "user:u")
    kit.advance(181 * DAY)
    retention(kit).run()
    with pytest.raises(ApiError) as refused:
        kit.create(idempotency_key="k")
    assert (refused.value.code, refused.value.details) == (
        "IDEMPOTENCY_KEY_REUSED",
        {"jobId": job_id, "reason": "expired"},
    )
    assert kit.create(idempotency_key="another").created

    kit.advance(365 * DAY)
    assert retention(kit).run().tombstones == 1
    assert kit.create(idempotency_key="k").created


def test_kept_jobs_do_not_hide_deletable_ones(kit: Kit) -> None:
    old = [kit.job_in("failed")[0] for _ in range(7)]
    waiting = [kit.new_job().id for _ in range(3)]
    kit.advance(181 * DAY)
    young = kit.job_in("succeeded")[0]
    assert retention(kit, batch=2).run().jobs == len(old)
    assert job_ids(kit) == {*waiting, young}


@contextmanager
def plug_in_table(kit: Kit, *job_ids: str) -> Iterator[None]:
    """Create a plug-in's table whose foreign key refers to these jobs, so that they can't be deleted."""
    metadata = MetaData()
    jobs = Table("ai_jobs", metadata, Column("id", Key(36), primary_key=True))
    table = Table("plug_in", metadata, Column("job_id", Key(36), ForeignKey(jobs.c.id)))
    table.create(kit.database.engine)
    with kit.database.transaction() as session:
        session.execute(insert(table), [{"job_id": job_id} for job_id in job_ids])
    try:
        yield
    finally:
        table.drop(kit.database.engine)


@pytest.mark.parametrize("held", [slice(0, 1), slice(1, 3), slice(0, 4), slice(4, 5), slice(0, 5)])
def test_chain_that_cannot_be_deleted_stops_no_other(kit: Kit, held: slice) -> None:
    """An earlier defect: one row of a plug-in's table stopped retention for ever."""
    ids = sorted(kit.new_job(idempotency_key=f"k{number}").id for number in range(5))
    for job_id in ids:
        kit.jobs.cancel(job_id, "user:u")
    stuck = ids[held]
    kit.advance(181 * DAY)
    with plug_in_table(kit, *stuck):
        for gone in (len(ids) - len(stuck), 0):
            with capture_logs() as lines:
                assert retention(kit, batch=2).run() == Pruned(gone, 0, failed=len(stuck))
            assert job_ids(kit) == set(stuck)
            failures = [line for line in lines if line["event"] == "retention.failed"]
            assert [line["rootId"] for line in failures] == stuck
            assert {line["error"] for line in failures} == {"IntegrityError"}
        for job_id in stuck:
            assert kit.types(job_id)[-1] == "cancelled", "the chain is kept as a whole"
        assert {row["job_id"] for row in kit.rows("job_tombstones")} == set(ids) - set(stuck)
    assert retention(kit, batch=2).run() == Pruned(len(stuck), 0)
    assert job_ids(kit) == set()


def test_retention_beside_a_retry_deletes_the_whole_chain_or_nothing(live_kit: Kit) -> None:
    kit = live_kit
    day = timedelta(days=1)
    now = Retention(kit.database, kit.clock, keep_jobs=timedelta(0), keep_tombstones=day, keep_sessions=day)
    for _ in range(10):
        parent, _ = kit.job_in("failed")
        _, retried = race(now.run, lambda parent=parent: kit.jobs.retry(parent, "operator:o"))
        left = job_ids(kit)
        if isinstance(retried, ApiError):
            assert retried.code == "JOB_NOT_FOUND"
            assert left == set()
        else:
            assert left == {parent, retried.job.id}
            kit.jobs.cancel(retried.job.id, "user:u")
            now.run()
    assert Check(kit.database, kit.clock, None).run().is_sound


def test_concurrent_retentions_delete_each_job_once(kit: Kit) -> None:
    for _ in range(20):
        kit.job_in("failed")
    kit.advance(181 * DAY)
    outcomes = race(*[retention(kit, batch=3).run] * 3)
    assert sum(pruned.jobs for pruned in outcomes) == 20
    assert job_ids(kit) == set()
