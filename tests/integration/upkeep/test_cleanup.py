"""Expired snapshots go; those of jobs that may still run stay."""

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
def test_the_snapshot_of_a_job_that_is_not_final_stays_however_old(kit: Kit, state: str) -> None:
    job_id, _ = kit.job_in(state)
    kit.advance(400 * DAY)
    assert SnapshotCleanup(kit.database, kit.clock).run() == 0
    assert snapshots(kit) == {job_id}


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_the_snapshot_of_a_final_job_goes_when_it_has_expired_and_no_sooner(kit: Kit, state: str) -> None:
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
    assert kit.row(job_id) == before, "the job itself stays"
    assert cleanup.run() == 0


def test_old_snapshots_that_must_stay_hide_none_that_may_go(kit: Kit) -> None:
    waiting = [kit.new_job().id for _ in range(5)]
    ended = [kit.job_in("failed")[0] for _ in range(5)]
    kit.advance(31 * DAY)
    assert SnapshotCleanup(kit.database, kit.clock, batch=2).run() == 5
    assert snapshots(kit) == set(waiting)
    assert not snapshots(kit) & set(ended)


def test_two_at_once_do_no_harm(kit: Kit) -> None:
    for _ in range(20):
        kit.job_in("failed")
    kit.advance(31 * DAY)
    outcomes = race(*[SnapshotCleanup(kit.database, kit.clock, batch=3).run] * 3)
    assert all(isinstance(one, int) for one in outcomes), outcomes
    assert snapshots(kit) == set()
