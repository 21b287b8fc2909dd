"""Passes skip rows that a stopped transaction has locked.

Only on servers, because SQLite has no row locks.
"""

from __future__ import annotations

import pytest
from sqlalchemy import select

from aijobs.jobs.errors import JobLockConflict
from aijobs.jobs.models import AiJob
from aijobs.outbox.models import OutboxEvent
from aijobs.upkeep.dispatcher import OutboxDispatcher
from aijobs.upkeep.reaper import LockReaper
from tests.support.databases import SERVERS
from tests.support.jobs import Kit

pytestmark = SERVERS


@pytest.mark.parametrize("tried", [False, True], ids=["in batches", "one by one, as retries"])
def test_stopped_dispatcher_does_not_block_events_behind_its_open_claim(kit: Kit, tried: bool) -> None:
    kit.broker.away = True
    ids = [kit.new_job().id for _ in range(12)]
    kit.broker.away = False
    kit.advance(2)
    with kit.database.transaction() as session:
        for event in session.execute(select(OutboxEvent)).scalars():
            event.attempt_count = 1 if tried else 0
    outbox = kit.services.outbox_events
    other = OutboxDispatcher(kit.database, outbox, kit.lifecycle, kit.broker, "d2", batch=5, fresh_s=60, tried_s=60)
    with kit.database.transaction() as stopped:
        head = outbox.find_dispatchable(stopped, 5, tried=tried)
        assert len(outbox.claim(stopped, head, "d1/x")) == 5
        assert other.cycle() == 7
        stopped.rollback()
    assert other.cycle() == 5
    assert {event.status for job_id in ids for event in kit.events(job_id, "ai.job.enqueue")} == {"published"}


def test_reaper_skips_rows_that_another_transaction_has_locked(kit: Kit) -> None:
    """Each wait would take five times ten seconds, and later leases would be taken minutes late."""
    leases = [kit.running() for _ in range(8)]
    held = sorted(lease.job_id for lease in leases)[:3]
    kit.advance(600)
    reaper = LockReaper(kit.database, kit.lifecycle, page=2)
    with kit.database.transaction() as stopped:
        for job_id in held:
            stopped.execute(select(AiJob.id).where(AiJob.id == job_id).with_for_update())
        assert reaper.reap() == 5
        assert {kit.job(job_id).uncharged_losses for job_id in held} == {0}
    assert reaper.reap() == 3
    assert [kit.job(lease.job_id).uncharged_losses for lease in leases] == [1] * 8


def test_renewal_for_a_suspect_does_not_wait_for_a_row_that_its_child_has_locked(kit: Kit) -> None:
    """Otherwise the watcher would renew the leases of other jobs too late."""
    lease = kit.running()
    until = kit.job(lease.job_id).lock_until
    kit.advance(15)
    with kit.database.transaction() as child:
        child.execute(select(AiJob.id).where(AiJob.id == lease.job_id).with_for_update())
        with pytest.raises(JobLockConflict):
            kit.lifecycle.extend_lock(lease, tries=1, waits=False)
    assert kit.job(lease.job_id).lock_until == until
    kit.lifecycle.extend_lock(lease, tries=1, waits=False)
    assert kit.job(lease.job_id).lock_until > until
