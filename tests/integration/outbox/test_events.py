"""Outbox rows: written with their change, found by state, claimed and marked by compare-and-set."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event as events
from sqlalchemy import insert

from aijobs.db.database import Database
from aijobs.errors import ApiError
from aijobs.ids import new_id
from aijobs.jobs.lease import JobErrorInfo
from aijobs.jobs.models import AiJob
from aijobs.outbox.models import OutboxEvent
from aijobs.outbox.repository import OutboxRepository
from tests.support.databases import SERVERS
from tests.support.jobs import BACKGROUND_TYPE, BEGIN, Kit, race
from tests.support.rows import build_job


def repository(kit: Kit) -> OutboxRepository:
    return kit.services.outbox_events


def find(kit: Kit, limit: int = 100, *, tried: bool = False) -> list[str]:
    with kit.database.read() as session:
        return repository(kit).find_dispatchable(session, limit, tried=tried)


def claim(kit: Kit, ids: list[str], holder: str = "d1/a") -> list[OutboxEvent]:
    return kit.database.write(lambda s: repository(kit).claim(s, ids, holder))


def event(kit: Kit, event_id: str) -> OutboxEvent:
    with kit.database.read() as session:
        return session.get_one(OutboxEvent, event_id)


def waiting_for(job: AiJob, attempt: int) -> AiJob:
    """The job as if it waited for `attempt`."""
    return build_job(id=job.id, attempt_no=attempt - 1, created_at=job.created_at)


def test_enqueue_payload_has_four_keys_and_names_no_user(kit: Kit) -> None:
    job = kit.new_job(user_id="secret-user", idempotency_key="k1", job_type=BACKGROUND_TYPE, priority=7)
    (row,) = kit.rows("outbox_events")
    assert row["payload"] == {
        "jobId": job.id,
        "jobType": BACKGROUND_TYPE,
        "queueName": "ai-background",
        "priority": 7,
    }
    assert (row["event_type"], row["aggregate_type"], row["aggregate_id"]) == ("ai.job.enqueue", "AiJob", job.id)
    assert row["dedupe_key"] == f"{BACKGROUND_TYPE}:secret-user:k=k1:1"
    assert (row["status"], row["attempt_count"], row["redrives"]) == ("pending", 0, 0)
    assert row["available_at"] == job.created_at + timedelta(seconds=1)
    assert "secret-user" not in json.dumps(row["payload"])


def ask(kit: Kit, session: Any, job: Any) -> OutboxEvent:
    """Add the event for the job's next attempt, and read the one that is there then."""
    repository(kit).ask(session, job)
    event = repository(kit).enqueue_event(session, job)
    assert event is not None
    return event


def test_existing_event_is_returned_and_the_transaction_goes_on(kit: Kit) -> None:
    job = kit.new_job()
    with kit.database.transaction() as session:
        first = ask(kit, session, job)
        again = ask(kit, session, job)
        other = ask(kit, session, waiting_for(job, 2))
        assert first.id == again.id
        other_id = other.id
    assert [e.id for e in kit.events(job.id)] == sorted([first.id, other_id])


def test_six_writers_of_one_event_all_succeed(kit: Kit) -> None:
    job = waiting_for(kit.new_job(), 2)

    def write(n: int) -> str:
        return kit.database.write(lambda session: ask(kit, session, job).id)

    ids = race(*[lambda n=n: write(n) for n in range(6)])
    assert len(set(ids)) == 1, ids
    assert len(kit.events(job.id)) == 2


def test_end_event_is_written_once_and_published_at_once(kit: Kit) -> None:
    for state, kind in (("succeeded", "completed"), ("failed", "failed"), ("cancelled", "cancelled")):
        job_id, _ = kit.job_in(state)
        (end,) = kit.events(job_id, f"ai.job.{kind}")
        assert (end.status, end.dedupe_key) == ("published", f"ai.job.{kind}:{job_id}")
        assert end.published_at is not None


@pytest.mark.parametrize("state", ["failed", "succeeded"])
def test_job_ends_even_if_its_end_event_exists(kit: Kit, state: str) -> None:
    """For example, after an operator restarted a job by SQL: its end event exists already."""
    job_id, _ = kit.job_in(state)
    kit.set(job_id, lifecycle_status="running", locked_by=None, finished_at=None, error_code=None)
    lease, error = kit.lock(job_id), JobErrorInfo.of("INTERNAL_ERROR")
    end = kit.lifecycle.mark_failed(lease, error) if state == "failed" else kit.lifecycle.mark_succeeded(lease)
    assert end.lifecycle_status == state
    kind = "completed" if state == "succeeded" else state
    assert len(kit.events(job_id, f"ai.job.{kind}")) == 1


def test_event_is_not_found_before_it_is_due(kit: Kit) -> None:
    job = kit.new_job()
    assert find(kit) == []
    kit.advance(0.999)
    assert find(kit) == []
    kit.advance(0.001)
    assert find(kit) == [e.id for e in kit.events(job.id)]


@SERVERS  # SQLite has one writer: no second transaction can be open.
def test_event_whose_transaction_commits_late_is_found(live_kit: Kit) -> None:
    """Commits aren't in the order of ids: a reader that remembered the last id would miss the first."""
    other = Database(live_kit.url)
    job = build_job()

    def add(session: Any, attempt: int) -> str:
        return ask(live_kit, session, waiting_for(job, attempt)).id

    try:
        with other.transaction() as session:
            early = add(session, 2)
            late = live_kit.database.write(lambda s: add(s, 3))
            assert early < late
            assert find(live_kit) == [late]
            claim(live_kit, [late])
        assert find(live_kit) == [early]
    finally:
        other.dispose()


def test_events_of_a_paused_queue_are_not_found(kit: Kit) -> None:
    held, free = kit.new_job(), kit.new_job(job_type=BACKGROUND_TYPE)
    kit.pause("ai-interactive")
    kit.advance(5)
    assert find(kit) == [e.id for e in kit.events(free.id)]
    assert kit.events(held.id)[0].status == "pending"


def test_four_dispatchers_at_once_claim_each_event_once(live_kit: Kit) -> None:
    with live_kit.database.transaction() as session:
        session.execute(insert(OutboxEvent), [_row(n) for n in range(200)])
    ids = find(live_kit, 200)
    taken = race(*[lambda n=n: [e.id for e in claim(live_kit, ids, f"d{n}/x")] for n in range(4)])
    assert sorted(i for part in taken for i in part) == sorted(ids)
    assert {row["attempt_count"] for row in live_kit.rows("outbox_events")} == {1}


def test_mark_under_an_old_claim_changes_nothing(kit: Kit) -> None:
    job = kit.new_job()
    kit.advance(1)
    (event_id,) = find(kit)
    (stale,) = claim(kit, [event_id], "d1/a")
    kit.database.write(lambda s: repository(kit).release_claims(s, [event_id], "d1/a", counted=True))
    claim(kit, [event_id], "d2/b")
    kit.database.write(lambda s: repository(kit).mark_published(s, [event_id], "d2/b", sent=True))
    before = kit.everything()
    marks = [
        lambda s: repository(kit).mark_published(s, [event_id], "d1/a", sent=True),
        lambda s: repository(kit).mark_failed(s, stale, "d1/a", "DISPATCH_FAILED: X"),
        lambda s: repository(kit).mark_dead(s, stale, "d1/a", "DISPATCH_FAILED: X"),
        lambda s: repository(kit).release_claims(s, [event_id], "d1/a", counted=False),
    ]
    assert [kit.database.write(mark) for mark in marks] == [0, 0, 0, 0]
    assert kit.everything() == before
    assert kit.events(job.id)[0].attempt_count == 2


def test_dispatcher_finds_events_by_an_index(kit: Kit) -> None:
    with kit.database.transaction() as session:
        for status in ("published", "dead"):
            session.execute(insert(OutboxEvent), [_row(n, status=status, name=status) for n in range(5000)])
        session.execute(insert(OutboxEvent), [_row(n) for n in range(5)])
    kit.analyze("outbox_events")
    kit.advance(60)
    for ask in (
        lambda s: repository(kit).find_dispatchable(s, 50, tried=False),
        lambda s: repository(kit).find_expired_claims(s, timedelta(seconds=60), 50),
    ):
        plan = _plan(kit, ask)
        assert "ix_outbox_events_" in plan, plan
        assert "Seq Scan on outbox_events" not in plan


def _plan(kit: Kit, ask: Any) -> str:
    """Return the plan of the statement that `ask(session)` runs."""
    captured: list[tuple[str, Any]] = []

    def note(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        captured.append((statement, parameters))

    events.listen(kit.database.engine, "before_cursor_execute", note)
    try:
        with kit.database.read() as session:
            ask(session)
    finally:
        events.remove(kit.database.engine, "before_cursor_execute", note)
    statement, parameters = next(one for one in captured if "outbox_events" in one[0])
    explain = "EXPLAIN QUERY PLAN" if kit.database.engine.dialect.name == "sqlite" else "EXPLAIN"
    with kit.database.engine.connect() as connection:
        return "\n".join(str(row) for row in connection.exec_driver_sql(f"{explain} {statement}", parameters))


def _row(number: int, *, status: str = "pending", name: str = "p") -> dict[str, Any]:
    return {
        "id": new_id(),
        "event_type": "ai.job.enqueue",
        "aggregate_type": "AiJob",
        "aggregate_id": f"job-{name}-{number}",
        "dedupe_key": f"{name}:{number}",
        "payload": {},
        "queue_name": "ai-interactive",
        "status": status,
        "attempt_count": 0,
        "available_at": BEGIN,
        "message_version": 1,
        "message_key_id": "k1",
        "created_at": BEGIN,
        "redrives": 0,
    }


# --- requeue -------------------------------------------------------------------------------------------------------


def _end_event(kit: Kit, status: str) -> str:
    job_id, _ = kit.job_in("failed")
    (end,) = kit.events(job_id, "ai.job.failed")
    with kit.database.transaction() as session:
        stored = session.get_one(OutboxEvent, end.id)
        stored.status, stored.attempt_count, stored.last_error = status, 3, "DISPATCH_FAILED: X"
    return end.id


def test_requeued_dead_event_is_pending_with_no_attempt_used(kit: Kit) -> None:
    event_id = _end_event(kit, "dead")
    answer = kit.services.outbox.requeue(event_id)
    assert (answer.status, answer.attempt_count, answer.locked_by) == ("pending", 0, None)
    assert event(kit, event_id).status == "pending"
    assert find(kit) == [event_id]


@pytest.mark.parametrize("status", ["pending", "processing", "published"])
def test_event_that_is_not_dead_is_not_requeued(kit: Kit, status: str) -> None:
    event_id = _end_event(kit, status)
    with pytest.raises(ApiError) as refused:
        kit.services.outbox.requeue(event_id)
    assert (refused.value.code, refused.value.http_status) == ("JOB_NOT_RETRYABLE", 409)
    assert event(kit, event_id).status == status


def test_enqueue_event_is_not_requeued(kit: Kit) -> None:
    job = kit.new_job()
    (enqueue,) = kit.events(job.id)
    with pytest.raises(ApiError) as refused:
        kit.services.outbox.requeue(enqueue.id)
    assert (refused.value.code, refused.value.http_status) == ("JOB_NOT_RETRYABLE", 409)


def test_requeue_of_no_event_is_not_found(kit: Kit) -> None:
    with pytest.raises(ApiError) as refused:
        kit.services.outbox.requeue("nope")
    assert refused.value.code == "NOT_FOUND"
