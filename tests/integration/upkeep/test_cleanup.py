"""Deletion of expired snapshots; those of open jobs are kept."""

from __future__ import annotations

from datetime import timedelta

import pytest

from aijobs.upkeep.cleanup import SnapshotCleanup
from tests.support.databases import ANY_DATABASE
from tests.support.jobs import Kit, race

DAY = 86_400


def snapshots(kit: Kit) -> set[str]:
    return {row["job_id"] for row in kit.rows("ai_job_snapshots")}


@pytest.mark.parametrize("state", ["queued", "running", "retrying", "cancel_requested"])
@ANY_DATABASE
def test_snapshot_of_an_open_job_is_kept(kit: Kit, state: str) -> None:
    job_id, _ = kit.job_in(state)
    kit.advance(400 * DAY)
    assert SnapshotCleanup(kit.database, kit.clock).run() == 0
    assert snapshots(kit) == {job_id}


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_snapshot_of_a_final_job_is_deleted_when_it_expires(kit: Kit, state: str) -> None:
    job_id, _ = kit.job_in(state)
    cleanup = SnapshotCleanup(kit.database, kit.clock)
    (row,) = kit.rows("ai_job_snapshots")
    assert row["expires_at"] == kit.job(job_id).created_at + timedelta(days=30)
    kit.advance(30 * DAY - 1)
    assert cleanup.run() == 0
    kit.advance(1)
    before = kit.row(job_id)
    assert cleanup.run() == 1
    assert snapshots(kit) == set()
    assert kit.row(job_id) == before, "the job itself is kept"
    assert cleanup.run() == 0


def test_old_snapshots_of_open_jobs_do_not_hide_deletable_ones(kit: Kit) -> None:
    waiting = [kit.new_job().id for _ in range(5)]
    ended = [kit.job_in("failed")[0] for _ in range(5)]
    kit.advance(31 * DAY)
    assert SnapshotCleanup(kit.database, kit.clock, batch=2).run() == 5
    assert snapshots(kit) == set(waiting)
    assert not snapshots(kit) & set(ended)


def test_concurrent_cleanups_do_no_harm(kit: Kit) -> None:
    for _ in range(20):
        kit.job_in("failed")
    kit.advance(31 * DAY)
    outcomes = race(*[SnapshotCleanup(kit.database, kit.clock, batch=3).run] * 3)
    assert all(isinstance(one, int) for one in outcomes), outcomes
    assert snapshots(kit) == set()
