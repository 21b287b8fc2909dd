"""Fencing: a stale lease writes nothing, and a late or repeated heartbeat loses nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from aijobs.ai.billing.usage import CallResult, UsageLog
from aijobs.ai.models import AiUsageLog
from aijobs.db.statements import change_rows
from aijobs.jobs.errors import JobLockConflict, LifecycleError, LockLost, RunsAlone
from aijobs.jobs.lease import JobErrorInfo, Lease
from aijobs.jobs.models import AiJob
from tests.support.jobs import BEGIN, Kit, race

ERROR = JobErrorInfo.of("PROVIDER_UNAVAILABLE", "no route")

HOLDERS_WRITES: dict[str, Callable[[Kit, Lease], Any]] = {
    "extend_lock": lambda kit, lease: kit.lifecycle.extend_lock(lease),
    "report_progress": lambda kit, lease: kit.lifecycle.report_progress(lease, 99),
    "save_output": lambda kit, lease: kit.lifecycle.save_output(lease, {"stale": True}),
    "note_provider_call": lambda kit, lease: kit.database.write(lambda s: kit.lifecycle.note_provider_call(s, lease)),
    "lock_row": lambda kit, lease: kit.database.write(lambda s: kit.lifecycle.lock_row(s, lease)),
    "mark_succeeded": lambda kit, lease: kit.lifecycle.mark_succeeded(lease, artifact_count=1),
    "mark_failed": lambda kit, lease: kit.lifecycle.mark_failed(lease, ERROR),
    "mark_cancelled": lambda kit, lease: kit.lifecycle.mark_cancelled(lease),
    "release": lambda kit, lease: kit.lifecycle.release(lease),
    "release_for_retry": lambda kit, lease: kit.lifecycle.release_for_retry(lease, BEGIN),
    "expire": lambda kit, lease: kit.lifecycle.expire(lease, kit.job(lease.job_id).lock_until or BEGIN),
}


def _stale_leases(kit: Kit) -> tuple[str, dict[str, Lease]]:
    """Return a job in its second attempt by the same worker, and leases that don't hold it."""
    old = kit.running()
    kit.lifecycle.release(old)
    now = kit.lock(old.job_id, "worker-1")
    other = kit.running()
    return old.job_id, {
        "the attempt before, of the same worker": old,
        "the attempt before under the new token": Lease(now.job_id, now.token, 1),
        "the new attempt under the old token": Lease(now.job_id, old.token, now.attempt_no),
        "a later attempt": Lease(now.job_id, now.token, now.attempt_no + 1),
        "the token of another job": Lease(now.job_id, other.token, now.attempt_no),
        "no token": Lease(now.job_id, "", now.attempt_no),
    }


@pytest.mark.parametrize("write", HOLDERS_WRITES)
def test_stale_lease_writes_nothing(kit: Kit, write: str) -> None:
    _, stale = _stale_leases(kit)
    before = kit.everything()
    for which, lease in stale.items():
        with pytest.raises(LockLost):
            HOLDERS_WRITES[write](kit, lease)
        assert kit.everything() == before, f"{write} with {which} wrote something"


def test_stale_lease_is_lost_also_while_a_cancel_is_requested(kit: Kit) -> None:
    job_id, stale = _stale_leases(kit)
    kit.lifecycle.request_cancel(job_id, "user:u1")
    before = kit.everything()
    for write in HOLDERS_WRITES.values():
        for lease in stale.values():
            with pytest.raises(LockLost):
                write(kit, lease)
    assert kit.everything() == before


def test_stale_lease_is_lost_also_after_the_new_attempt_ended_the_job(kit: Kit) -> None:
    job_id, stale = _stale_leases(kit)
    kit.lifecycle.mark_succeeded(Lease(job_id, kit.job(job_id).locked_by or "", 2))
    before = kit.everything()
    with pytest.raises(LockLost):
        kit.lifecycle.mark_failed(stale["the attempt before, of the same worker"], ERROR)
    assert kit.everything() == before


def test_refused_write_rolls_back_its_whole_transaction(kit: Kit) -> None:
    job_id, stale = _stale_leases(kit)
    before = kit.everything()

    def work(session: Any) -> None:
        UsageLog(kit.clock).open(session, session.get(AiJob, job_id), "local", "m")
        kit.lifecycle.mark_succeeded(stale["the attempt before, of the same worker"], session)

    with pytest.raises(LockLost):
        kit.database.write(work)
    assert kit.everything() == before


def test_mark_succeeded_refuses_the_columns_of_another_job(sqlite_kit: Kit) -> None:
    """The end event and the log line are made from them."""
    kit, one = sqlite_kit, sqlite_kit.running()
    other = kit.lifecycle.lock_job(kit.new_job().id, "worker-2").job
    before = kit.everything()
    with pytest.raises(ValueError, match=other.id):
        kit.lifecycle.mark_succeeded(one, job=other)
    assert kit.everything() == before


def test_heartbeat_that_changes_nothing_does_not_lose_the_lease(kit: Kit) -> None:
    lease = kit.running()
    for _ in range(2):
        kit.lifecycle.extend_lock(lease)
        kit.lifecycle.report_progress(lease, 30)
    job = kit.job(lease.job_id)
    assert (job.lock_until, job.progress) == (BEGIN + timedelta(seconds=60), 30)


def test_change_rows_counts_matched_rows_even_if_unchanged(kit: Kit) -> None:
    job_id = kit.new_job().id
    with kit.database.transaction() as session:
        assert change_rows(session, update(AiJob).where(AiJob.id == job_id).values(priority=AiJob.priority)) == 1
        assert change_rows(session, update(AiJob).where(AiJob.id == "nobody").values(priority=1)) == 0


def test_heartbeat_renews_an_expired_lease_that_nobody_has_taken(kit: Kit) -> None:
    lease = kit.running()
    kit.advance(65)
    kit.lifecycle.extend_lock(lease)
    assert kit.job(lease.job_id).lock_until == BEGIN + timedelta(seconds=125)
    assert kit.lifecycle.find_expired_locks() == []
    kit.lifecycle.mark_succeeded(lease)
    assert kit.job(lease.job_id).lifecycle_status == "succeeded"


def test_late_result_succeeds_if_nobody_has_taken_the_lease(kit: Kit) -> None:
    lease = kit.running()
    kit.advance(100_000)
    kit.lifecycle.save_output(lease, {"paid": True})
    kit.lifecycle.mark_succeeded(lease)
    assert kit.job(lease.job_id).lifecycle_status == "succeeded"


def test_progress_never_falls_within_an_attempt_and_stays_within_0_and_100(kit: Kit) -> None:
    lease = kit.running()
    seen = []
    for percent in (10, 5, 60, 59, -3, 1000, 100):
        kit.lifecycle.report_progress(lease, percent)
        seen.append(kit.job(lease.job_id).progress)
    assert seen == [10, 10, 60, 60, 60, 100, 100]
    kit.lifecycle.release(lease)
    assert kit.job(lease.job_id).progress == 100
    kit.lock(lease.job_id)
    assert kit.job(lease.job_id).progress == 0, "a new attempt begins at 0"


def test_progress_keeps_its_last_value_in_a_failed_job_and_is_100_in_a_succeeded_one(kit: Kit) -> None:
    failed, succeeded = kit.running(), kit.running()
    kit.lifecycle.report_progress(failed, 40)
    kit.lifecycle.mark_failed(failed, ERROR)
    kit.lifecycle.mark_succeeded(succeeded)
    assert (kit.job(failed.job_id).progress, kit.job(succeeded.job_id).progress) == (40, 100)


def test_old_leases_of_a_failed_job_write_nothing(kit: Kit) -> None:
    lease = kit.running()
    kit.set(lease.job_id, uncharged_losses=3)
    kit.advance(91)
    kit.lifecycle.expire(lease, kit.job(lease.job_id).lock_until)
    kit.advance(16)
    second = kit.lock(lease.job_id)
    kit.advance(91)
    kit.lifecycle.expire(second, kit.job(lease.job_id).lock_until)
    assert kit.job(lease.job_id).lifecycle_status == "failed"
    kit.advance(45 * 60)
    before = kit.everything()
    with pytest.raises(JobLockConflict):
        kit.lock(lease.job_id)
    for write in HOLDERS_WRITES.values():
        for old in (lease, second):
            with pytest.raises(LifecycleError):
                write(kit, old)
    assert kit.everything() == before


# --- expired leases -----------------------------------------------------------------------------------------------


def test_lease_counts_as_lost_90_seconds_after_its_last_renewal(kit: Kit) -> None:
    lease = kit.running()
    kit.advance(15)
    kit.lifecycle.extend_lock(lease)
    kit.advance(89.999)
    assert kit.lifecycle.find_expired_locks() == []
    kit.advance(0.001)
    assert [job.id for job in kit.lifecycle.find_expired_locks()] == [lease.job_id]
    assert [job.id for job in kit.lifecycle.find_expired_locks(90_000)] == [lease.job_id]
    assert kit.lifecycle.find_expired_locks(90_001) == []


def test_long_job_with_heartbeats_is_never_lost(kit: Kit) -> None:
    lease = kit.running()
    for _ in range(16):
        kit.advance(15)
        assert kit.lifecycle.find_expired_locks() == []
        kit.lifecycle.extend_lock(lease)
    kit.lifecycle.mark_succeeded(lease)
    assert kit.job(lease.job_id).lifecycle_status == "succeeded"


def test_lost_leases_are_found_page_by_page_oldest_first(kit: Kit) -> None:
    leases = []
    for n in range(5):
        leases.append(kit.running())
        kit.advance(0 if n == 1 else 1)
    kit.advance(200)
    every_lease = [job.id for job in kit.lifecycle.find_expired_locks()]
    assert sorted(every_lease) == sorted(lease.job_id for lease in leases)
    found, after = [], None
    while page := kit.lifecycle.find_expired_locks(limit=2, after=after):
        found += [job.id for job in page]
        after = (page[-1].lock_until, page[-1].id)
    assert found == every_lease


def test_heartbeat_after_the_reapers_read_wins(kit: Kit) -> None:
    lease = kit.running()
    kit.advance(91)
    (seen,) = kit.lifecycle.find_expired_locks()
    kit.lifecycle.extend_lock(lease)
    before = kit.everything()
    with pytest.raises(LockLost):
        kit.lifecycle.expire(lease, seen.lock_until)
    kit.lifecycle.request_cancel(lease.job_id, "user:u1")
    with pytest.raises(LockLost):
        kit.lifecycle.expire(lease, seen.lock_until)
    assert kit.row(lease.job_id)["lock_until"] == before["ai_jobs"][0]["lock_until"]
    assert kit.types(lease.job_id) == ["created", "locked", "cancel_requested"]


WAITS = {
    ("synthetic", False): [2],
    ("synthetic", True): [2, 4],
    ("synthetic_background", False): [5, 10],
    ("synthetic_background", True): [5, 10, 20],
}


@pytest.mark.parametrize(("job_type", "saved"), WAITS)
def test_charged_losses_use_the_queues_attempts_and_double_the_backoff(kit: Kit, job_type: str, saved: bool) -> None:
    job_id = kit.new_job(job_type=job_type).id
    waits = WAITS[job_type, saved]
    for lost, wait in enumerate([*waits, None], start=1):
        lease = kit.lock(job_id)
        assert lease.attempt_no == lost
        if saved and lost == 1:
            kit.lifecycle.save_output(lease, {"paid": True})
        kit.advance(3)
        now = kit.clock.at
        kit.lifecycle.charge(lease)
        job = kit.job(job_id)
        assert (job.lost_count, job.uncharged_losses, job.retry_count) == (lost, 0, 0)
        if wait is None:
            break
        assert job.lifecycle_status == "running"
        assert job.next_attempt_at == now + timedelta(seconds=wait)
        assert kit.events(job_id)[-1].available_at == job.next_attempt_at
        with pytest.raises(JobLockConflict):
            kit.lock(job_id)
        kit.advance(wait)
    assert (job.lifecycle_status, job.error_code, job.finished_at) == ("failed", "INTERNAL_WORKER_LOST", now)
    assert job.public_error_message
    assert kit.types(job_id)[-2:] == ["lease_lost", "failed"]
    assert kit.types(job_id).count("lease_lost") == len(waits) + 1


def test_five_losses_of_any_kind_fail_a_job(kit: Kit) -> None:
    job_id = kit.new_job(job_type="synthetic_background").id
    kit.set(job_id, lost_count=1)
    for number, wait in enumerate([10, 20, 40, None], start=1):
        lease = kit.lock(job_id)
        kit.advance(90)
        kit.lifecycle.expire(lease, kit.job(job_id).lock_until)
        job = kit.job(job_id)
        assert (job.lost_count, job.uncharged_losses) == (1, number)
        if wait is None:
            break
        assert (job.lifecycle_status, job.next_attempt_at) == ("running", kit.clock.at + timedelta(seconds=wait))
        kit.advance(wait)
    assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_WORKER_LOST")
    assert kit.row(job_id)["internal_error_message"] == "its own process died 1 times, shared ones 4 times"


def test_uncharged_losses_use_no_attempts_of_the_queue(kit: Kit) -> None:
    lease = kit.running()
    kit.set(lease.job_id, uncharged_losses=3)
    kit.lifecycle.charge(lease)
    kit.advance(60)
    job = kit.job(lease.job_id)
    assert (job.lifecycle_status, job.lost_count) == ("running", 1)
    assert kit.lifecycle.charge(kit.lock(lease.job_id)).lifecycle_status == "failed"


def test_uncharged_loss_asks_for_the_next_attempt(kit: Kit) -> None:
    lease = kit.running()
    kit.set(lease.job_id, uncharged_losses=1)
    job = kit.lifecycle.lose_uncharged(lease)
    assert (job.lifecycle_status, job.locked_by, job.lost_count, job.uncharged_losses) == ("running", None, 0, 2)
    kit.advance(60)
    assert kit.lock(lease.job_id).attempt_no == 2


def test_charge_with_a_stale_lease_changes_nothing(kit: Kit) -> None:
    lease = kit.running()
    kit.lifecycle.release(lease)
    kit.lock(lease.job_id)
    before = kit.everything()
    with pytest.raises(LockLost):
        kit.lifecycle.charge(lease)
    assert kit.everything() == before


def test_charged_loss_of_a_job_with_a_cancel_request_cancels_it(kit: Kit) -> None:
    lease = kit.running()
    kit.lifecycle.request_cancel(lease.job_id, "user:u1")
    assert kit.lifecycle.charge(lease).lifecycle_status == "cancelled"


def test_history_distinguishes_charged_from_uncharged_losses(kit: Kit) -> None:
    lease = kit.running()
    kit.lifecycle.expire(lease, kit.job(lease.job_id).lock_until, at_once=True)
    kit.lifecycle.charge(kit.lock(lease.job_id))
    rows = [row for row in kit.rows("ai_job_events", job_id=lease.job_id) if row["type"] == "lease_lost"]
    recorded = [(row["actor"], row["error_code"]) for row in sorted(rows, key=lambda row: row["seq"])]
    assert recorded == [("reaper", None), ("worker", "INTERNAL_WORKER_LOST")]


def test_shared_worker_cannot_lock_a_suspect(kit: Kit) -> None:
    job_id = kit.new_job().id
    kit.set(job_id, uncharged_losses=1)
    before = kit.everything()
    with pytest.raises(RunsAlone):
        kit.lifecycle.lock_job(job_id, "worker-1", suspects=False)
    assert kit.everything() == before
    assert kit.lifecycle.lock_job(job_id, "worker-1").job.attempt_no == 1


def test_loss_by_a_restart_counts_and_has_no_backoff(kit: Kit) -> None:
    lease = kit.running()
    kit.advance(3)
    kit.lifecycle.expire(lease, kit.job(lease.job_id).lock_until, at_once=True)
    job = kit.job(lease.job_id)
    assert (job.uncharged_losses, job.next_attempt_at) == (1, BEGIN + timedelta(seconds=3))
    assert kit.lock(lease.job_id, "worker-2").attempt_no == 2


def test_release_counts_nothing_and_the_job_is_locked_at_once(kit: Kit) -> None:
    lease = kit.running()
    for _ in range(5):
        kit.lifecycle.release(lease)
        lease = kit.lock(lease.job_id)
    job = kit.job(lease.job_id)
    assert (job.lifecycle_status, job.attempt_no, job.lost_count, job.retry_count) == ("running", 6, 0, 0)


@pytest.mark.parametrize("how", ["release", "expire"])
def test_open_call_of_a_lost_attempt_is_marked_lost_and_can_still_be_closed(kit: Kit, how: str) -> None:
    lease = kit.running()
    usage = UsageLog(kit.clock)
    call = kit.database.write(lambda s: usage.open(s, s.get(AiJob, lease.job_id), "local", "m"))
    done = kit.database.write(lambda s: usage.open(s, s.get(AiJob, lease.job_id), "local", "m"))
    kit.database.write(lambda s: usage.close(s, done, CallResult("local", "m", billed="yes")))
    HOLDERS_WRITES[how](kit, lease)
    states = {row["id"]: (row["state"], row["billed"]) for row in kit.rows("ai_usage_logs")}
    assert states == {call: ("lost", "unknown"), done: ("done", "yes")}
    kit.database.write(lambda s: usage.close(s, call, CallResult("local", "m", prompt_tokens=3, billed="yes")))
    with kit.database.read() as session:
        row = session.execute(select(AiUsageLog).where(AiUsageLog.id == call)).scalar_one()
    assert (row.state, row.prompt_tokens, row.billed) == ("done", 3, "yes")


# --- races with real threads ---------------------------------------------------------------------------------------


def test_heartbeat_and_reaper_at_once_have_one_winner(live_kit: Kit) -> None:
    kit = live_kit
    for _ in range(25):
        lease = kit.running()
        lost = BEGIN - timedelta(days=30)
        kit.set(lease.job_id, lock_until=lost)
        renewed, reaped = race(
            lambda lease=lease: _after_a_moment(kit.lifecycle.extend_lock, lease),
            lambda lease=lease, lost=lost: _after_a_moment(kit.lifecycle.expire, lease, lost),
        )
        job = kit.job(lease.job_id)
        assert [isinstance(one, REFUSED) for one in (renewed, reaped)].count(True) == 1
        lost = job.uncharged_losses
        assert (job.locked_by is None, lost) == ((True, 1) if isinstance(renewed, LockLost) else (False, 0))
        assert kit.types(lease.job_id) == ["created", "locked", "lease_lost"][: 2 + lost]


def test_success_and_reaper_at_once_have_one_winner(live_kit: Kit) -> None:
    kit = live_kit
    for _ in range(25):
        lease = kit.running(job_type="synthetic")
        lost = BEGIN - timedelta(days=30)
        kit.set(lease.job_id, lock_until=lost, uncharged_losses=4)
        succeeded, reaped = race(
            lambda lease=lease: _after_a_moment(kit.lifecycle.mark_succeeded, lease),
            lambda lease=lease, lost=lost: _after_a_moment(kit.lifecycle.expire, lease, lost),
        )
        job = kit.job(lease.job_id)
        assert [isinstance(one, LifecycleError) for one in (succeeded, reaped)].count(True) == 1
        if isinstance(succeeded, LifecycleError):
            assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_WORKER_LOST")
            assert kit.types(lease.job_id) == ["created", "locked", "lease_lost", "failed"]
        else:
            assert (job.lifecycle_status, job.error_code) == ("succeeded", None)
            assert kit.types(lease.job_id) == ["created", "locked", "succeeded"]
        assert len([event for event in kit.events(lease.job_id) if event.event_type != "ai.job.enqueue"]) == 1


def test_four_reapers_at_once_count_a_lost_lease_once(live_kit: Kit) -> None:
    kit = live_kit
    for _ in range(10):
        lease = kit.running(job_type="synthetic_background")
        until = kit.job(lease.job_id).lock_until
        outcomes = race(*[lambda lease=lease, until=until: kit.lifecycle.expire(lease, until)] * 4)
        assert [isinstance(one, REFUSED) for one in outcomes].count(True) == 3
        assert kit.job(lease.job_id).uncharged_losses == 1
        assert len(kit.events(lease.job_id)) == 2


REFUSED = (LockLost, JobLockConflict)
"""A reaper is refused if another write was first, or if another transaction has locked the row."""


def _after_a_moment(work: Callable[..., Any], *arguments: Any) -> Any:
    time.sleep(random.uniform(0, 0.003))
    return work(*arguments)
