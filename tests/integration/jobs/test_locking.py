"""Locking a job: one winner, a new token each time, and a lease by the database's clock."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import delete
from sqlalchemy.exc import OperationalError

from aijobs.db.database import CommitUnknown
from aijobs.jobs.errors import JobLockConflict
from aijobs.jobs.lease import JobErrorInfo, lease_of
from aijobs.jobs.models import AiJobSnapshot
from aijobs.outbox.models import OutboxEventType, OutboxState
from tests.support.jobs import BEGIN, Kit, race
from tests.support.lost_commits import lose_commits

MINUTE = timedelta(seconds=60)


def test_one_of_32_workers_locks_a_job(live_kit: Kit) -> None:
    kit, job_id = live_kit, live_kit.new_job().id
    outcomes = race(*(lambda n=n: kit.lock(job_id, f"worker-{n}") for n in range(32)))
    winners = [one for one in outcomes if not isinstance(one, Exception)]
    assert len(winners) == 1
    assert {type(one) for one in outcomes if isinstance(one, Exception)} == {JobLockConflict}
    job = kit.job(job_id)
    assert (job.attempt_no, job.locked_by) == (1, winners[0].token)
    assert kit.types(job_id) == ["created", "locked"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_lock_of_a_single_statement_whose_answer_was_lost_is_confirmed(
    kit: Kit, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no COMMIT that could be lost: the connection goes with the statement's own answer."""
    job_id, once, lost = kit.new_job().id, kit.database._once, list[str]()

    def lossy(begin: Any, work: Any, alone: bool) -> Any:
        if lost:
            return once(begin, work, alone)
        lost.append(when)
        if when == "after":
            once(begin, work, alone)
        raise CommitUnknown(OperationalError("…", {}, Exception("gone"), connection_invalidated=True))

    monkeypatch.setattr(kit.database, "_once", lossy)
    lease = kit.lock(job_id)
    assert lost == [when]
    assert kit.job(job_id).locked_by == lease.token
    assert kit.types(job_id) == ["created", "locked"]
    assert [event.status for event in kit.events(job_id, OutboxEventType.ENQUEUE)] == [OutboxState.PUBLISHED]


def test_unhindered_lock_is_one_statement_where_the_database_can(kit: Kit) -> None:
    job_id = kit.new_job().id
    (event,) = kit.events(job_id, OutboxEventType.ENQUEUE)
    with kit.statements() as seen:
        locked = kit.lifecycle.lock_job(job_id, "worker-1", event_id=event.id)
    assert locked.event_id == event.id
    statements = [statement for statement in seen if not statement.startswith("BEGIN")]
    assert len(statements) == (1 if kit.database.joins_statements else 4)


def test_event_of_an_earlier_attempt_locks_the_job_and_publishes_the_right_event(kit: Kit) -> None:
    """A late copy of the first message may arrive when the job waits for its second attempt."""
    lease = kit.running()
    (first,) = kit.events(lease.job_id, OutboxEventType.ENQUEUE)
    kit.lifecycle.release(lease)
    locked = kit.lifecycle.lock_job(lease.job_id, "worker-2", event_id=first.id)
    second = kit.events(lease.job_id, OutboxEventType.ENQUEUE)[-1]
    assert (locked.job.attempt_no, locked.event_id) == (2, second.id)
    assert second.status == OutboxState.PUBLISHED


def test_lock_is_visible_at_once_and_lasts_a_minute(live_kit: Kit) -> None:
    kit = live_kit
    job_id = kit.new_job().id
    kit.lifecycle.lock_job(job_id, "worker-1")
    job = kit.job(job_id)
    with kit.database.engine.connect() as other:
        assert other.exec_driver_sql("SELECT lifecycle_status FROM ai_jobs").scalar() == "running"
    assert job.locked_at is not None
    assert job.lock_until is not None
    assert job.lock_until - job.locked_at == MINUTE, "both are of one instant, even if the clock runs on"
    assert job.started_at == job.locked_at


def test_lock_changes_its_own_columns_and_no_others(kit: Kit) -> None:
    job_id = kit.new_job().id
    before = kit.row(job_id)
    kit.advance(5)
    lease = kit.lock(job_id)
    after = kit.row(job_id)
    now = BEGIN + timedelta(seconds=5)
    changed = {name: value for name, value in after.items() if value != before[name]}
    assert changed == {
        "lifecycle_status": "running",
        "status": "processing",
        "event_seq": 2,
        "attempt_no": 1,
        "locked_by": lease.token,
        "locked_at": now,
        "lock_until": now + MINUTE,
        "started_at": now,
    }
    assert lease.instance == "worker-1"


def test_lock_marks_its_enqueue_event_published(kit: Kit) -> None:
    job_id = kit.new_job().id
    assert [event.status for event in kit.events(job_id)] == [OutboxState.PENDING]
    lease = kit.lock(job_id)
    (event,) = kit.events(job_id)
    assert (event.status, event.published_at, event.last_sent_at) == (OutboxState.PUBLISHED, BEGIN, None)
    kit.lifecycle.release(lease)
    assert [event.status for event in kit.events(job_id)] == [OutboxState.PUBLISHED, OutboxState.PENDING]
    kit.lock(job_id, "worker-2")
    assert [event.status for event in kit.events(job_id)] == [OutboxState.PUBLISHED, OutboxState.PUBLISHED]


@pytest.mark.parametrize("hint", ["its own", "of the attempt before", "of another job", "of nothing", None])
def test_lock_marks_its_own_event_even_if_the_message_names_another(kit: Kit, hint: str | None) -> None:
    """A message may be old: sent again, or for an earlier attempt."""
    job_id, other = kit.new_job().id, kit.new_job().id
    kit.lifecycle.release(kit.lock(job_id))
    before, asks = kit.events(job_id)
    named = {
        "its own": asks.id,
        "of the attempt before": before.id,
        "of another job": kit.events(other)[0].id,
        "of nothing": "nobody's",
        None: None,
    }[hint]
    locked = kit.lifecycle.lock_job(job_id, "worker-2", event_id=named)
    assert (locked.job.attempt_no, locked.event_id) == (2, asks.id)
    assert [event.status for event in kit.events(job_id)] == [OutboxState.PUBLISHED, OutboxState.PUBLISHED]
    assert [event.status for event in kit.events(other)] == [OutboxState.PENDING]


def test_confirmed_lock_returns_event_and_input(kit: Kit) -> None:
    job_id = kit.new_job({"output": {"said": "this"}}).id
    (event,) = kit.events(job_id)
    for named in (event.id, None):
        with lose_commits(kit.database, "after"):
            locked = kit.lifecycle.lock_job(job_id, "worker-1", event_id=named)
        assert locked.content is not None
        assert json.loads(locked.content)["calls"][0]["output"] == {"said": "this"}
        asked = kit.events(job_id)[-1]
        assert (locked.event_id, asked.status) == (asked.id, OutboxState.PUBLISHED)
        kit.lifecycle.release(lease_of(locked.job))


def test_lock_returns_no_input_if_it_expired_or_an_output_is_saved(kit: Kit) -> None:
    paid, expired = kit.new_job(), kit.new_job()
    lease = kit.lock(paid.id)
    kit.lifecycle.save_output(lease, {"said": "paid for"})
    kit.lifecycle.release(lease)
    with kit.database.transaction() as session:
        session.execute(delete(AiJobSnapshot).where(AiJobSnapshot.job_id == expired.id))
    assert kit.lifecycle.lock_job(paid.id, "worker-2").content is None, "its output is saved: the input isn't needed"
    assert kit.lifecycle.lock_job(expired.id, "worker-2").content is None


def test_each_lock_has_a_new_token_even_for_the_same_worker(kit: Kit) -> None:
    job_id = kit.new_job().id
    leases = []
    for _ in range(3):
        leases.append(kit.lock(job_id, "worker-1"))
        kit.advance(1)
        kit.lifecycle.release(leases[-1])
    assert len({lease.token for lease in leases}) == 3
    assert [lease.attempt_no for lease in leases] == [1, 2, 3]
    job = kit.job(job_id)
    assert (job.started_at, job.lost_count, job.retry_count) == (BEGIN, 0, 0), "started once, nothing counted"


def test_job_is_not_locked_before_it_is_due(kit: Kit) -> None:
    lease = kit.running()
    kit.lifecycle.release_for_retry(lease, BEGIN + timedelta(seconds=10))
    kit.advance(9.999)
    before = kit.everything()
    with pytest.raises(JobLockConflict):
        kit.lock(lease.job_id)
    assert kit.everything() == before
    kit.advance(0.001)
    assert kit.lock(lease.job_id).attempt_no == 2
    assert kit.job(lease.job_id).next_attempt_at is None


def test_job_of_a_paused_queue_is_not_locked_and_other_queues_go_on(kit: Kit) -> None:
    here, there = kit.new_job(), kit.new_job(job_type="synthetic_background")
    kit.pause("ai-interactive")
    before = kit.row(here.id)
    with pytest.raises(JobLockConflict):
        kit.lock(here.id)
    assert kit.row(here.id) == before
    assert kit.lock(there.id).attempt_no == 1


def test_running_job_of_a_paused_queue_finishes(kit: Kit) -> None:
    lease = kit.running()
    kit.pause("ai-interactive")
    kit.lifecycle.extend_lock(lease)
    kit.lifecycle.mark_succeeded(lease)
    assert kit.job(lease.job_id).lifecycle_status == "succeeded"


def test_history_names_the_process_that_gave_a_job_up(kit: Kit) -> None:
    job_id = kit.new_job().id
    kit.pause("ai-interactive")
    kit.lifecycle.give_up(job_id, 1, JobErrorInfo.of("INTERNAL_NOT_DISPATCHED", "three times"))
    job = kit.row(job_id)
    assert (job["lifecycle_status"], job["error_code"], job["internal_error_message"], job["attempt_no"]) == (
        "failed",
        "INTERNAL_NOT_DISPATCHED",
        "three times",
        1,
    )
    assert [(row.type, row.actor, row.error_code) for row in kit.history(job_id)] == [
        ("created", "user:u1", None),
        ("locked", "dispatcher", None),
        ("failed", "dispatcher", "INTERNAL_NOT_DISPATCHED"),
    ]
    assert [row.instance for row in kit.history(job_id)] == [None, "dispatcher", "dispatcher"]


@pytest.mark.parametrize("attempt", [0, 2, 3])
def test_give_up_of_another_attempt_is_refused(sqlite_kit: Kit, attempt: int) -> None:
    kit, job_id = sqlite_kit, sqlite_kit.new_job().id
    before = kit.everything()
    with pytest.raises(JobLockConflict):
        kit.lifecycle.give_up(job_id, attempt, JobErrorInfo.of("INTERNAL_NOT_DISPATCHED"))
    assert kit.everything() == before


def test_give_up_and_lock_at_once_have_one_winner(live_kit: Kit) -> None:
    kit = live_kit
    for _ in range(10):
        job_id = kit.new_job().id
        error = JobErrorInfo.of("INTERNAL_NOT_DISPATCHED")
        locked, given_up = race(
            lambda job_id=job_id: kit.lifecycle.lock_job(job_id, "worker-1"),
            lambda job_id=job_id, error=error: kit.lifecycle.give_up(job_id, 1, error),
        )
        refused = [one for one in (locked, given_up) if isinstance(one, JobLockConflict)]
        assert len(refused) == 1
        assert kit.job(job_id).lifecycle_status == ("failed" if isinstance(locked, Exception) else "running")
        assert kit.types(job_id) == ["created", "locked", "failed"][: 3 if isinstance(locked, Exception) else 2]


def test_jobs_are_found_by_state_and_queue_oldest_first(kit: Kit) -> None:
    first, second = kit.new_job(), kit.new_job(job_type="synthetic_background")
    kit.advance(1)
    third = kit.new_job()
    kit.lock(third.id)
    found = kit.lifecycle.find_by_lifecycle_status
    assert [job.id for job in found(["queued", "running"])] == [first.id, second.id, third.id]
    assert [job.id for job in found(["queued"], queue_name="ai-interactive")] == [first.id]
    assert [job.id for job in found(["queued", "running"], limit=2)] == [first.id, second.id]
    assert found([]) == []
    assert found(["failed"]) == []


def test_job_that_nobody_holds_has_no_lease(sqlite_kit: Kit) -> None:
    with pytest.raises(ValueError, match="is not held"):
        lease_of(sqlite_kit.new_job())


def test_enqueue_event_of_a_new_job_is_due_after_a_second(kit: Kit) -> None:
    job = kit.new_job(user_id="somebody", priority=7)
    (event,) = kit.events(job.id)
    assert (event.event_type, event.aggregate_type, event.aggregate_id) == (OutboxEventType.ENQUEUE, "AiJob", job.id)
    assert event.payload == {"jobId": job.id, "jobType": "synthetic", "queueName": "ai-interactive", "priority": 7}
    assert event.available_at == job.created_at + timedelta(seconds=1) == BEGIN + timedelta(seconds=1)
    assert event.dedupe_key == f"synthetic:somebody:j={job.id}:1"
