"""An acknowledged cancel ends the job as cancelled, whatever else is written at once. A late one changes nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from aijobs.db.database import Database
from aijobs.errors import ApiError
from aijobs.ids import new_id
from aijobs.jobs.errors import CancelRequested, JobLockConflict, LifecycleError
from aijobs.jobs.lease import JobErrorInfo, Lease
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import END_EVENTS, FINAL
from aijobs.outbox.models import OutboxEventType, OutboxState
from tests.support.jobs import BEGIN, STUBBORN_TYPE, Kit, open_kit, race
from tests.support.rows import build_job

ERROR = JobErrorInfo.of("PROVIDER_UNAVAILABLE", "no route")


def _end_events(kit: Kit, job_id: str) -> list[str]:
    return [event.event_type for event in kit.events(job_id) if event.event_type != OutboxEventType.ENQUEUE]


@pytest.mark.parametrize("state", ["queued", "retrying"])
def test_waiting_job_is_cancelled_at_once_with_its_event_and_message(kit: Kit, state: str) -> None:
    job_id, _ = kit.job_in(state)
    kit.advance(2)
    sent = kit.broker.pending_count("ai-interactive")
    job = kit.jobs.cancel(job_id, "user:u1", user_id="u1")
    now = BEGIN + timedelta(seconds=2)
    assert (job.lifecycle_status, job.cancel_requested_at, job.cancel_requested_by, job.finished_at) == (
        "cancelled",
        now,
        "user:u1",
        now,
    )
    assert [(row.type, row.actor) for row in kit.history(job_id)[-2:]] == [
        ("cancel_requested", "user:u1"),
        ("cancelled", "user:u1"),
    ]
    assert not [event for event in kit.events(job_id) if event.status == OutboxState.PENDING]
    assert _end_events(kit, job_id) == ["ai.job.cancelled"]
    # The creator handed over the message of the queued job. That of the second attempt isn't sent yet.
    assert kit.broker.pending_count("ai-interactive") == sent - (1 if state == "queued" else 0)
    with pytest.raises(JobLockConflict):
        kit.lock(job_id)


def test_running_job_records_a_cancel_request_once_and_sends_a_hint(kit: Kit) -> None:
    lease = kit.running()
    for n, by in enumerate(("user:u1", "operator:ann", "user:u1")):
        kit.advance(1)
        job = kit.jobs.cancel(lease.job_id, by)
        assert (job.lifecycle_status, job.cancel_requested_at, job.cancel_requested_by) == (
            "running",
            BEGIN + timedelta(seconds=1),
            "user:u1",
        ), f"request {n}"
    assert kit.types(lease.job_id) == ["created", "locked", "cancel_requested"]
    assert kit.broker.find_cancel_hints([lease.job_id]) == {lease.job_id}


@pytest.mark.parametrize("state", [*sorted(FINAL), "cancelled_waiting"])
def test_cancel_of_a_final_job_returns_its_state(kit: Kit, state: str) -> None:
    job_id, _ = kit.job_in(state)
    before = kit.everything()
    for _ in range(2):
        assert kit.jobs.cancel(job_id, "user:u1").lifecycle_status in state
    code = "JOB_ALREADY_CANCELLED" if state.startswith("cancelled") else "JOB_NOT_CANCELLABLE"
    with pytest.raises(ApiError) as refused:
        kit.jobs.cancel(job_id, "user:u1", strict=True)
    assert refused.value.code == code
    assert kit.everything() == before


def test_strict_cancel_of_a_waiting_job_cancels_it(sqlite_kit: Kit) -> None:
    job_id = sqlite_kit.new_job().id
    assert sqlite_kit.jobs.cancel(job_id, "user:u1", strict=True).lifecycle_status == "cancelled"


@pytest.mark.parametrize("by", ["user:u1", "operator:ann"])
def test_uncancellable_job_type_refuses_users_and_operators_until_the_job_is_final(sqlite_kit: Kit, by: str) -> None:
    kit = sqlite_kit
    lease = kit.running(job_type=STUBBORN_TYPE)
    before = kit.everything()
    with pytest.raises(ApiError) as refused:
        kit.jobs.cancel(lease.job_id, by)
    assert refused.value.code == "JOB_NOT_CANCELLABLE"
    assert kit.everything() == before
    kit.lifecycle.mark_succeeded(lease)
    assert kit.jobs.cancel(lease.job_id, by).lifecycle_status == "succeeded"


def test_job_of_an_unknown_type_can_be_cancelled(sqlite_kit: Kit) -> None:
    job = build_job(job_type="gone", event_seq=1)
    with sqlite_kit.database.transaction() as session:
        session.add(job)
    assert sqlite_kit.jobs.cancel(job.id, "operator:ann").lifecycle_status == "cancelled"


def test_cancel_of_another_users_job_is_not_found_like_no_job(kit: Kit) -> None:
    job_id = kit.new_job(user_id="u1").id
    asked = [(job_id, owner) for owner in ("", "0", "U1", "u1 ", "01", "ú1", "ｕ１")]
    for one, owner in [*asked, (new_id(), "u1"), (job_id.upper(), "u1"), (job_id + " ", "u1")]:
        with pytest.raises(ApiError) as refused:
            kit.jobs.cancel(one, "user:x", user_id=owner)
        assert (refused.value.code, refused.value.details) == ("JOB_NOT_FOUND", None)
    assert kit.types(job_id) == ["created"]


def test_cancel_needs_no_broker(kit: Kit) -> None:
    queued, running = kit.new_job().id, kit.running().job_id
    kit.broker.away = True
    assert kit.jobs.cancel(queued, "user:u1").lifecycle_status == "cancelled"
    assert kit.jobs.cancel(running, "user:u1").cancel_requested_at is not None


def test_cancelled_job_is_not_locked_after_its_hint_is_lost(kit: Kit) -> None:
    job_id = kit.new_job().id
    message = kit.broker.take("ai-interactive")
    assert message.job_id == job_id
    kit.jobs.cancel(job_id, "user:u1")
    kit.broker.lose_all()
    with pytest.raises(JobLockConflict):
        kit.lifecycle.lock_job(message.job_id, "late-worker")
    assert kit.types(job_id) == ["created", "cancel_requested", "cancelled"]


# --- races ---------------------------------------------------------------------------------------------------------


def _take_over(kit: Kit, lease: Lease) -> AiJob:
    """Take the lease as the reaper does: its next pass tries again if another transaction has locked the row."""
    until = kit.job(lease.job_id).lock_until
    assert until is not None
    while True:
        try:
            return kit.lifecycle.expire(lease, until)
        except JobLockConflict:
            time.sleep(0.001)


AGAINST: dict[str, Callable[[Kit, Lease], Any]] = {
    "success": lambda kit, lease: kit.lifecycle.mark_succeeded(lease),
    "failure": lambda kit, lease: kit.lifecycle.mark_failed(lease, ERROR),
    "retry": lambda kit, lease: kit.lifecycle.release_for_retry(lease, BEGIN),
    "release": lambda kit, lease: kit.lifecycle.release(lease),
    "takeover": _take_over,
}


@pytest.mark.parametrize("against", AGAINST)
def test_acknowledged_cancel_wins_over_every_other_write(live_kit: Kit, against: str) -> None:
    kit = live_kit
    for _ in range(15):
        lease = kit.running(job_type="synthetic_background")
        cancelled, other = race(
            lambda lease=lease: _at_some_time(kit.jobs.cancel, lease.job_id, "user:u1"),
            lambda lease=lease: _at_some_time(AGAINST[against], kit, lease),
        )
        assert isinstance(cancelled, AiJob), cancelled
        job, types = kit.job(lease.job_id), kit.types(lease.job_id)
        if isinstance(other, CancelRequested):
            assert job.lifecycle_status == "running"
            assert job.cancel_requested_at is not None
            kit.lifecycle.mark_cancelled(lease)
            job, types = kit.job(lease.job_id), kit.types(lease.job_id)
        else:
            assert not isinstance(other, Exception), other
        assert job.lifecycle_status in FINAL, "a job with a cancel request doesn't go on"
        assert _end_events(kit, job.id) == [END_EVENTS[job.lifecycle_status]]
        if job.cancel_requested_at is None:
            assert against in ("success", "failure")
            assert types == ["created", "locked", job.lifecycle_status]
            assert cancelled.lifecycle_status == job.lifecycle_status
        else:
            assert job.lifecycle_status == "cancelled"
            assert [one for one in types if one in ("cancel_requested", "cancelled")] == [
                "cancel_requested",
                "cancelled",
            ]
            assert types[-1] == "cancelled"
        assert not [event for event in kit.events(job.id) if event.status == OutboxState.PENDING]


def test_cancel_and_lock_at_once_cancel_the_job_or_leave_a_request(live_kit: Kit) -> None:
    kit = live_kit
    for _ in range(25):
        job_id = kit.new_job().id
        cancelled, locked = race(
            lambda job_id=job_id: _at_some_time(kit.jobs.cancel, job_id, "user:u1"),
            lambda job_id=job_id: _at_some_time(kit.lifecycle.lock_job, job_id, "worker-1"),
        )
        assert isinstance(cancelled, AiJob)
        job = kit.job(job_id)
        if isinstance(locked, JobLockConflict):
            assert (job.lifecycle_status, job.attempt_no) == ("cancelled", 0)
            assert kit.types(job_id) == ["created", "cancel_requested", "cancelled"]
        else:
            assert (job.lifecycle_status, cancelled.lifecycle_status) == ("running", "running")
            assert kit.types(job_id) == ["created", "locked", "cancel_requested"]


def test_ten_cancels_at_once_leave_one_request_and_one_end(live_kit: Kit) -> None:
    kit = live_kit
    for make in (lambda: kit.new_job().id, lambda: kit.running().job_id):
        job_id = make()
        outcomes = race(*(partial(kit.jobs.cancel, job_id, f"operator:{n}") for n in range(10)))
        assert all(isinstance(one, AiJob) for one in outcomes)
        assert len({one.cancel_requested_by for one in outcomes}) == 1
        assert kit.types(job_id).count("cancel_requested") == 1
        assert len(_end_events(kit, job_id)) == (1 if kit.job(job_id).lifecycle_status == "cancelled" else 0)


def test_holder_of_a_job_with_a_cancel_request_can_only_cancel_it(kit: Kit) -> None:
    lease = kit.running()
    kit.lifecycle.request_cancel(lease.job_id, "user:u1")
    with pytest.raises(CancelRequested):
        kit.lifecycle.mark_succeeded(lease)
    job = kit.lifecycle.mark_failed(lease, ERROR)
    assert (job.lifecycle_status, job.error_code, job.public_error_message) == ("cancelled", None, None)
    with pytest.raises(LifecycleError):
        kit.lifecycle.mark_succeeded(lease)


def test_cancel_request_is_visible_to_another_process(live_kit: Kit) -> None:
    kit = live_kit
    lease = kit.running()
    other = Database(kit.url)
    try:
        assert _asked(other, lease.job_id) is False
        kit.jobs.cancel(lease.job_id, "user:u1")
        assert _asked(other, lease.job_id) is True
    finally:
        other.dispose()


def test_locks_of_two_processes_at_once_have_one_winner(live_kit: Kit) -> None:
    kit = live_kit
    job_id = kit.new_job().id
    with open_kit(kit.url) as second:
        one, two = race(lambda: kit.lock(job_id, "a"), lambda: second.lock(job_id, "b"))
    assert [isinstance(each, JobLockConflict) for each in (one, two)].count(True) == 1


def _asked(database: Database, job_id: str) -> bool:
    with database.read() as session:
        return session.get_one(AiJob, job_id).cancel_requested_at is not None


def _at_some_time(work: Callable[..., Any], *arguments: Any) -> Any:
    time.sleep(random.uniform(0, 0.006))
    return work(*arguments)
