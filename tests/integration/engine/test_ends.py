"""Announcements of ends: each end of a job is announced once on the event bus and in the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from aijobs.events import DomainEvent
from aijobs.jobs.errors import LockLost
from aijobs.jobs.lease import JobErrorInfo
from aijobs.jobs.status import END_EVENTS
from aijobs.logs import JOB_KEYS
from aijobs.outbox.models import OutboxEvent
from aijobs.queues.message import OutgoingMessage
from aijobs.testing.memory_broker import MemoryBroker
from aijobs.upkeep.dispatcher import OutboxDispatcher
from aijobs.upkeep.reaper import LockReaper
from tests.integration.engine.stage import Held, Stage
from tests.support.jobs import BACKGROUND_TYPE, KEYS, Kit
from tests.support.lost_commits import lose_commits
from tests.support.polling import poll

ENDS = [f"job.{status}" for status in END_EVENTS]


@dataclass
class Announcements:
    """The announcements of this process."""

    lines: Callable[[], list[dict[str, Any]]]
    events: list[DomainEvent] = field(default_factory=list)

    def heard(self, job_id: str) -> list[tuple[str, Any, Any]]:
        """Return type, state and error code of each event of the job."""
        mine = [event for event in self.events if event.job_id == job_id]
        return [(event.type, event.payload["lifecycleStatus"], event.payload["errorCode"]) for event in mine]

    def logged(self, job_id: str) -> list[dict[str, Any]]:
        """Return the log lines of the job's end."""
        return [line for line in self.lines() if line["event"] in ENDS and line["jobId"] == job_id]


@pytest.fixture
def announced(sqlite_stage: Stage, log_lines: Callable[[], list[dict[str, Any]]]) -> Announcements:
    announced = Announcements(log_lines)
    for event_type in END_EVENTS.values():
        sqlite_stage.kit.services.bus.subscribe(event_type, announced.events.append)
    return announced


class Refusing(MemoryBroker):
    """A broker that refuses every message."""

    def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
        return {message.event_id: ValueError("refused") for message in messages}


# --- ways to an end ------------------------------------------------------------------------------------------------


def _succeed(stage: Stage) -> str:
    job_id = stage.kit.new_job().id
    stage.run(job_id)
    return job_id


def _fail(stage: Stage) -> str:
    job_id = stage.kit.new_job({"raise": "CONTENT_SAFETY_BLOCKED"}).id
    stage.run(job_id)
    return job_id


def _cancel_running(stage: Stage) -> str:
    job_id = stage.kit.new_job({"sleep_ms": 600_000}).id
    delivery = stage.start(job_id)
    poll(stage.active.all, what="the job runs")
    stage.kit.jobs.cancel(job_id, "user:u1")
    delivery.wait()
    return job_id


def _drain_cancelled(stage: Stage) -> str:
    stage.engine.close()
    script = Held()
    job_id = stage.kit.new_job(job_type=stage.scripted(script)).id
    delivery = stage.start(job_id)
    assert script.begun.wait(10)
    stage.kit.jobs.cancel(job_id, "user:u1")
    stage.engine.drain(0)
    assert delivery.wait() == "cancelled"
    script.go.set()
    return job_id


def _cancel_waiting(stage: Stage) -> str:
    job_id = stage.kit.new_job().id
    stage.kit.jobs.cancel(job_id, "operator:o1")
    stage.kit.jobs.cancel(job_id, "operator:o1")
    return job_id


def _cancel_retrying(stage: Stage) -> str:
    job_id, _ = stage.kit.job_in("retrying")
    stage.kit.jobs.cancel(job_id, "user:u1")
    return job_id


def _lose_workers(stage: Stage) -> str:
    kit, job_id = stage.kit, stage.kit.new_job().id
    while kit.job(job_id).lifecycle_status != "failed":
        kit.lock(job_id)
        kit.advance(90)
        LockReaper(kit.database, kit.lifecycle).reap()
        kit.advance(600)
    return job_id


def _lose_cancelled(stage: Stage) -> str:
    job_id, _ = stage.kit.job_in("cancel_requested")
    stage.kit.advance(90)
    LockReaper(stage.kit.database, stage.kit.lifecycle).reap()
    return job_id


def _refuse_message(stage: Stage) -> str:
    kit = stage.kit
    kit.broker.away = True
    job_id = kit.new_job().id
    broker = Refusing(KEYS)
    for _ in range(3):
        kit.advance(30)
        OutboxDispatcher(kit.database, kit.services.outbox_events, kit.lifecycle, broker, "d1").cycle()
    return job_id


def _forget_type(stage: Stage) -> str:
    kit = stage.kit
    job_id = kit.new_job(job_type=BACKGROUND_TYPE).id
    del kit.services.registry._definitions[BACKGROUND_TYPE]
    with kit.database.transaction() as session:
        session.execute(update(OutboxEvent).values(redrives=3, status="published"))
    kit.advance(timedelta(hours=2).total_seconds())
    stage.run(job_id)
    return job_id


WAYS: dict[str, tuple[Callable[[Stage], str], str, str | None]] = {
    "success": (_succeed, "succeeded", None),
    "error": (_fail, "failed", "CONTENT_SAFETY_BLOCKED"),
    "cancel of a running job": (_cancel_running, "cancelled", None),
    "shutdown of a cancelled attempt": (_drain_cancelled, "cancelled", None),
    "cancel of a waiting job": (_cancel_waiting, "cancelled", None),
    "cancel between two attempts": (_cancel_retrying, "cancelled", None),
    "last lost worker": (_lose_workers, "failed", "INTERNAL_WORKER_LOST"),
    "lost worker of a cancelled job": (_lose_cancelled, "cancelled", None),
    "message that can't be sent": (_refuse_message, "failed", "INTERNAL_NOT_DISPATCHED"),
    "unknown type": (_forget_type, "failed", "INTERNAL_UNKNOWN_JOB_TYPE"),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_end_is_announced_once_on_the_bus_and_in_the_log(
    sqlite_stage: Stage, announced: Announcements, way: str
) -> None:
    end, status, code = WAYS[way]
    job_id = end(sqlite_stage)
    assert sqlite_stage.kit.job(job_id).lifecycle_status == status
    assert announced.heard(job_id) == [(END_EVENTS[status], status, code)]
    (line,) = announced.logged(job_id)
    assert set(JOB_KEYS) <= set(line)
    shown = {key: line[key] for key in ("event", "level", "lifecycleStatus", "errorCode", "queueName")}
    assert shown == {
        "event": f"job.{status}",
        "level": "warning" if status == "failed" else "info",
        "lifecycleStatus": status,
        "errorCode": code,
        "queueName": sqlite_stage.kit.job(job_id).queue_name,
    }


@pytest.mark.parametrize("way", ["success", "error", "cancel of a running job"])
def test_log_line_of_an_end_has_outbox_id_and_duration(sqlite_stage: Stage, announced: Announcements, way: str) -> None:
    job_id = WAYS[way][0](sqlite_stage)
    (line,) = announced.logged(job_id)
    assert line["outboxId"] == sqlite_stage.kit.events(job_id)[0].id
    assert line["durationMs"] is not None


def test_rolled_back_end_is_not_announced(sqlite_stage: Stage, announced: Announcements) -> None:
    kit = sqlite_stage.kit
    lease = kit.running()

    def fail_and_give_up(session: Any) -> None:
        kit.lifecycle.mark_failed(lease, JobErrorInfo.of("INTERNAL_ERROR"), session)
        raise LockLost(lease.job_id, "changed its mind")

    with pytest.raises(LockLost):
        kit.database.write(fail_and_give_up)
    assert kit.job(lease.job_id).lifecycle_status == "running"
    assert announced.heard(lease.job_id) == []
    assert announced.logged(lease.job_id) == []


ENDINGS: dict[str, Callable[[Kit, Any], Any]] = {
    "succeeded": lambda kit, lease: kit.lifecycle.mark_succeeded(lease),
    "failed": lambda kit, lease: kit.lifecycle.mark_failed(lease, JobErrorInfo.of("INTERNAL_ERROR")),
    "cancelled": lambda kit, lease: kit.jobs.cancel(lease.job_id, "user:u1"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("status", ENDINGS)
def test_end_whose_commit_answer_is_lost_is_announced_once(
    sqlite_stage: Stage, announced: Announcements, status: str, when: Any
) -> None:
    kit = sqlite_stage.kit
    sqlite_stage.engine.close()  # So that the watcher commits nothing.
    lease = kit.running()
    if status == "cancelled":
        kit.lifecycle.release(lease)
    with lose_commits(kit.database, when) as left:
        ENDINGS[status](kit, lease)
    assert left == [0]
    assert [kind for kind, _, _ in announced.heard(lease.job_id)] == [END_EVENTS[status]]


# --- jobs whose message was never sent --------------------------------------------------------------------------------


def test_job_cancelled_before_its_message_was_sent_has_no_queued_time(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    kit.broker.away = True
    job_id = kit.new_job().id
    kit.advance(5)
    kit.jobs.cancel(job_id, "user:u1")
    (event, _) = kit.events(job_id)
    assert (event.status, event.published_at, event.last_sent_at) == ("published", None, None)
    job = kit.services.monitor.get_job(job_id).job
    assert (job.phase, job.queued_at) == ("cancelled", None)


def test_job_cancelled_after_its_message_was_sent_keeps_its_queued_time(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    job_id = kit.new_job().id
    kit.advance(5)
    OutboxDispatcher(kit.database, kit.services.outbox_events, kit.lifecycle, kit.broker, "d1").cycle()
    sent_at = kit.clock.at  # type: ignore[attr-defined]
    kit.advance(5)
    kit.jobs.cancel(job_id, "user:u1")
    assert kit.services.monitor.get_job(job_id).job.queued_at == sent_at
