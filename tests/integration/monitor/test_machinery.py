"""Queues, outbox and workers on each database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aijobs.clock import utc_now
from aijobs.db.database import Database
from aijobs.errors import ApiError
from aijobs.ids import new_id
from aijobs.monitor.monitor import Monitor
from aijobs.outbox.models import QueuePause
from aijobs.queues.presence import WorkerPresence
from tests.support.rows import BEGIN, add, build_event, build_job, held


def presence(**changes: Any) -> WorkerPresence:
    values: dict[str, Any] = {
        "instance_id": "host~boot~1~77~5~ab",
        "queue": "ai-interactive",
        "host": "host",
        "pid": 77,
        "started_at": BEGIN,
        "active_job_count": 1,
        "active_job_ids": ("x",),
        "slots": 4,
        "age_s": 3.0,
    }
    return WorkerPresence(**{**values, **changes})


def test_queue_status_counts_queued_active_and_retrying_jobs(database: Database, monitor: Monitor, broker: Any) -> None:
    waits = {"lifecycle_status": "running", "attempt_no": 1, "started_at": BEGIN}
    old = utc_now() - timedelta(hours=2)
    add(
        database,
        build_job(created_at=old),
        build_job(created_at=utc_now()),
        build_job(**held()),
        build_job(**held()),
        build_job(**waits),
        build_job(queue_name="ai-background", **held()),
        QueuePause(queue_name="ai-background", reason="full", paused_by="operator:x", paused_at=BEGIN),
    )
    others = presence(instance_id="b"), presence(queue="ai-maintenance"), presence(queue="ai-background", age_s=31.0)
    broker.depth, broker.beats = 4, [presence(), *others]
    interactive, background = monitor.queue_statuses()
    assert (interactive.queue_name, background.queue_name) == ("ai-interactive", "ai-background")
    assert (interactive.queued.value, interactive.active.value, interactive.retrying.value) == (2, 2, 1)
    assert (background.queued.value, background.active.value, background.retrying.value) == (0, 1, 0)
    assert interactive.broker_depth == 4
    assert (interactive.workers, background.workers) == (2, 0), "a late worker isn't counted"
    assert interactive.oldest_age_s == pytest.approx(7200, abs=60)
    assert (background.oldest_queued_at, background.oldest_age_s) == (None, None)
    assert interactive.paused is None
    assert background.paused is not None
    assert (background.paused.reason, background.paused.at) == ("full", BEGIN)


def test_broker_outage_hides_only_broker_numbers(database: Database, monitor: Monitor, broker: Any) -> None:
    add(database, build_job(**held()))
    broker.depth = None
    status = monitor.queue_statuses()[0]
    assert (status.broker_depth, status.workers, status.active.value) == (None, None, 1)
    workers = monitor.workers()
    assert workers.broker_away
    assert [worker.state for worker in workers.workers] == ["unknown"]


def test_worker_with_jobs_but_without_a_heartbeat_is_lost(database: Database, monitor: Monitor, broker: Any) -> None:
    mine, theirs = build_job(**held()), build_job(**held(locked_by="other~boot~1~9~5~cd/t"))
    add(database, mine, theirs, build_job())
    broker.beats = [presence(), presence(instance_id="late", age_s=31.0)]
    live, late, lost = monitor.workers().workers
    assert (live.state, late.state, lost.state) == ("live", "late", "lost")
    assert (late.active_job_count, late.active_job_ids) == (0, ()), "an old heartbeat says nothing about jobs"
    assert [job.id for job in live.holds] == [mine.id]
    assert (lost.host, lost.pid, lost.active_job_ids) == ("other", 9, (theirs.id,))
    assert live.started_at == "2026-03-01T08:00:00.000Z"
    assert [(row.slots, row.policy_slots) for row in (live, lost)] == [(4, 2), (None, 2)]


def test_outbox_status_shows_pending_dead_and_unknown_events(database: Database, monitor: Monitor) -> None:
    job = build_job()
    due = utc_now() - timedelta(minutes=5)
    pending = build_event(job, status="pending", published_at=None, available_at=due)
    later = build_event(job, status="pending", published_at=None, available_at=utc_now() + timedelta(hours=1))
    dead = build_event(job, event_type="ai.job.failed", status="dead", last_error="DISPATCH_FAILED: ValueError")
    dead_enqueue = build_event(job, status="dead")
    odd = build_event(job, event_type="ai.odd", last_error="UNKNOWN_EVENT_TYPE")
    add(database, job, pending, later, dead, dead_enqueue, odd, build_event(job))
    status = monitor.outbox_status()
    assert {name: count.value for name, count in status.counts.items()} == {
        "pending": 2,
        "processing": 0,
        "published": 2,
        "dead": 2,
    }
    assert status.lag_s == pytest.approx(300, abs=60)
    assert {row.id for row in status.dead} == {dead.id, dead_enqueue.id}
    assert {row.id: row.requeueable for row in status.dead} == {dead.id: True, dead_enqueue.id: False}
    assert [row.id for row in status.unknown_types] == [odd.id]
    assert monitor.get_event(dead.id).last_error == "DISPATCH_FAILED: ValueError"
    with pytest.raises(ApiError):
        monitor.get_event(new_id())


def test_outbox_without_due_events_has_no_lag(database: Database, monitor: Monitor) -> None:
    job = build_job()
    later = build_event(job, status="pending", published_at=None, available_at=utc_now() + timedelta(hours=1))
    add(database, job, later)
    assert (monitor.outbox_status().lag_s, monitor.outbox_status().oldest_pending_at) == (0.0, None)


@pytest.mark.parametrize("status", [None, "published"])
def test_outbox_pages_show_each_event_once(database: Database, monitor: Monitor, status: str | None) -> None:
    job = build_job()
    events = [build_event(job) for _ in range(11)]
    add(database, job, *events)
    seen: list[str] = []
    cursor = None
    while True:
        page = monitor.list_outbox(status=status, cursor=cursor, limit=3)
        seen += [row.id for row in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == sorted((event.id for event in events), reverse=True)
    assert monitor.list_outbox(status=status, event_type="ai.job.failed").items == ()
