"""The re-drive: it sends lost messages again, and no others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from aijobs.errors import BrokerUnavailable
from aijobs.ids import new_id
from aijobs.jobs.models import AiJob
from aijobs.outbox.models import OutboxEvent
from aijobs.outbox.repository import outgoing
from aijobs.upkeep.dispatcher import OutboxDispatcher
from aijobs.upkeep.redrive import Redrive
from tests.support.databases import ANY_DATABASE
from tests.support.jobs import BACKGROUND_TYPE, Kit, race
from tests.support.lines import captured_lines
from tests.support.rows import build_job


def redrive(kit: Kit, broker: Any = None, **options: Any) -> Redrive:
    return Redrive(kit.database, kit.clock, kit.services.outbox_events, broker or kit.broker, **options)


def dispatched(kit: Kit, **changes: Any) -> str:
    """Create a job whose message is in the queue and whose event is published; return its id."""
    job_id = kit.new_job(**changes).id
    kit.advance(1)
    services = kit.services
    OutboxDispatcher(services.database, services.outbox_events, services.lifecycle, kit.broker, "d").cycle()
    return job_id


def redrives(kit: Kit, job_id: str) -> int:
    return kit.events(job_id, "ai.job.enqueue")[-1].redrives


def test_lost_message_is_sent_again(kit: Kit) -> None:
    job_id = dispatched(kit)
    kit.broker.lose_all()
    kit.advance(10)
    assert redrive(kit).run() == 1
    message = kit.broker.take("ai-interactive")
    assert message is not None
    assert message.job_id == job_id
    event = kit.events(job_id)[0]
    assert (event.redrives, event.status, event.attempt_count) == (1, "published", 1), "no attempt is counted"
    assert event.last_sent_at == kit.clock.at  # type: ignore[attr-defined]


@ANY_DATABASE
def test_message_popped_by_a_dead_worker_is_sent_again(kit: Kit) -> None:
    job_id = dispatched(kit)
    assert kit.broker.take("ai-interactive") is not None
    kit.advance(10)
    assert redrive(kit).run() == 1
    assert redrives(kit, job_id) == 1


@ANY_DATABASE
def test_message_is_not_sent_again_before_it_has_been_due_for_a_while(kit: Kit) -> None:
    dispatched(kit)
    kit.broker.lose_all()
    kit.advance(3.9)
    assert redrive(kit).run() == 0
    kit.advance(2.1)
    assert redrive(kit).run() == 1


@ANY_DATABASE
def test_recently_sent_message_is_not_sent_again(kit: Kit) -> None:
    job_id = dispatched(kit)
    kit.broker.lose_all()
    kit.advance(10)
    assert redrive(kit).run() == 1
    kit.broker.lose_all()
    kit.advance(4.9)
    assert redrive(kit).run() == 0
    kit.advance(0.2)
    assert redrive(kit).run() == 1
    assert redrives(kit, job_id) == 2


def test_lost_message_of_a_retry_is_sent_again(kit: Kit) -> None:
    job_id = dispatched(kit)
    kit.lifecycle.release(kit.lock(job_id))
    services = kit.services
    OutboxDispatcher(services.database, services.outbox_events, services.lifecycle, kit.broker, "d").cycle()
    kit.broker.lose_all()
    kit.advance(10)
    assert redrive(kit).run() == 1
    assert redrives(kit, job_id) == 1
    assert kit.events(job_id, "ai.job.enqueue")[0].redrives == 0, "the event of the earlier attempt doesn't change"


@pytest.mark.parametrize("state", ["running", "cancel_requested", "succeeded", "failed", "cancelled"])
@ANY_DATABASE
def test_message_of_a_job_that_waits_for_no_worker_is_not_sent_again(kit: Kit, state: str) -> None:
    kit.job_in(state)
    kit.broker.lose_all()
    kit.advance(60)
    before = kit.everything()
    assert redrive(kit).run() == 0
    assert kit.everything() == before


@ANY_DATABASE
def test_redrive_ignores_undispatched_events(kit: Kit) -> None:
    kit.broker.away = True
    kit.new_job()
    kit.broker.away = False
    kit.advance(60)
    assert redrive(kit).run() == 0


@ANY_DATABASE
def test_redrive_ignores_jobs_that_are_not_due(kit: Kit) -> None:
    job_id = dispatched(kit)
    kit.lifecycle.release_for_retry(kit.lock(job_id), kit.clock.at + timedelta(hours=1))  # type: ignore[attr-defined]
    kit.broker.lose_all()
    kit.advance(3600)
    assert redrive(kit).run() == 0


def test_redrive_skips_a_paused_queue(kit: Kit) -> None:
    held, free = dispatched(kit), dispatched(kit, job_type=BACKGROUND_TYPE)
    kit.pause("ai-interactive")
    kit.broker.lose_all()
    kit.advance(10)
    assert redrive(kit).run() == 1
    assert (redrives(kit, held), redrives(kit, free)) == (0, 1)


@ANY_DATABASE
def test_redrive_can_be_limited_to_one_queue(kit: Kit) -> None:
    other, own = dispatched(kit), dispatched(kit, job_type=BACKGROUND_TYPE)
    kit.broker.lose_all()
    kit.advance(10)
    assert redrive(kit).run("ai-background") == 1
    assert (redrives(kit, other), redrives(kit, own)) == (0, 1)


def test_lost_message_behind_healthy_ones_is_sent_again(kit: Kit) -> None:
    healthy = [dispatched(kit) for _ in range(7)]
    lost = dispatched(kit)
    kit.broker.remove(outgoing(kit.events(lost)[0], kit.job(lost)))
    kit.advance(10)
    assert redrive(kit, page=2).run() == 1
    assert redrives(kit, lost) == 1
    assert {redrives(kit, job_id) for job_id in healthy} == {0}


@ANY_DATABASE
def test_redrive_of_a_healthy_backlog_sends_nothing(kit: Kit) -> None:
    """Ten thousand jobs have waited for an hour, and the broker has all their messages."""
    jobs = [build_job() for _ in range(10_000)]
    events = [_event(job) for job in jobs]
    with kit.database.transaction() as session:
        session.execute(insert(AiJob), [_columns(job) for job in jobs])
        session.execute(insert(OutboxEvent), events)
    kit.broker.send([outgoing(OutboxEvent(**event), job) for event, job in zip(events, jobs, strict=True)])
    kit.advance(3600)
    sent = kit.broker.sent
    assert redrive(kit).run() == 0
    assert kit.broker.sent == sent
    assert kit.broker.pending_count("ai-interactive") == 10_000
    kit.broker.remove(outgoing(OutboxEvent(**events[7777]), jobs[7777]))
    assert redrive(kit).run() == 1


def _columns(job: AiJob) -> dict[str, Any]:
    given = {name: getattr(job, name) for name in AiJob.__table__.columns.keys() if name in vars(job)}  # noqa: SIM118
    return {**given, "attempt_no": 0, "event_seq": 0, "progress": 0, "retry_count": 0, "lost_count": 0}


def _event(job: AiJob) -> dict[str, Any]:
    return {
        "id": new_id(),
        "event_type": "ai.job.enqueue",
        "aggregate_type": "AiJob",
        "aggregate_id": job.id,
        "dedupe_key": f"synthetic:u1:j={job.id}:1",
        "payload": {},
        "queue_name": "ai-interactive",
        "status": "published",
        "attempt_count": 1,
        "available_at": job.created_at,
        "published_at": job.created_at,
        "last_sent_at": job.created_at,
        "message_version": 1,
        "message_key_id": "k1",
        "created_at": job.created_at,
        "redrives": 0,
    }


def test_concurrent_redrives_send_and_count_each_message_once(kit: Kit) -> None:
    ids = [dispatched(kit) for _ in range(20)]
    kit.broker.lose_all()
    kit.advance(10)
    outcomes = race(*[redrive(kit, page=6).run] * 3)
    assert sum(outcomes) == 20, outcomes
    assert kit.broker.pending_count("ai-interactive") == 20
    assert {redrives(kit, job_id) for job_id in ids} == {1}


@ANY_DATABASE
def test_redrive_counts_nothing_during_a_broker_outage(kit: Kit) -> None:
    job_id = dispatched(kit)
    kit.broker.lose_all()
    kit.broker.away = True
    kit.advance(10)
    assert redrive(kit).run() == 0
    assert redrives(kit, job_id) == 0
    kit.broker.away = False
    assert redrive(kit).run() == 1


@ANY_DATABASE
def test_all_messages_are_sent_again_after_the_broker_lost_everything(kit: Kit) -> None:
    ids = [dispatched(kit) for _ in range(20)]
    kit.broker.lose_all()
    kit.advance(10)
    assert redrive(kit).run() == 20
    taken = {message.job_id for _ in ids if (message := kit.broker.take("ai-interactive"))}
    assert taken == set(ids)


@ANY_DATABASE
def test_message_with_a_removed_key_is_signed_with_the_current_key(kit: Kit) -> None:
    job_id = dispatched(kit)
    with kit.database.transaction() as session:
        session.get_one(OutboxEvent, kit.events(job_id)[0].id).message_key_id = "gone"
    kit.broker.lose_all()
    for _ in range(2):
        kit.advance(10)
        redrive(kit).run()
    message = kit.broker.take("ai-interactive")
    assert message is not None
    assert message.job_id == job_id


@ANY_DATABASE
def test_broker_is_logged_as_back_only_after_a_redrive_that_used_it(kit: Kit) -> None:
    job_id = dispatched(kit)
    kit.advance(10)
    one = redrive(kit)
    with captured_lines() as lines:
        kit.broker.away = True
        one.run()
        lease = kit.lock(job_id)
        one.run()
        assert [line["event"] for line in lines() if "redrive" in line["event"]] == ["redrive.broker.away"]
        kit.lifecycle.release(lease)
        kit.broker.away = False
        dispatched(kit)
        kit.advance(10)
        one.run()
        assert [line["event"] for line in lines() if "redrive.b" in line["event"]][1:] == ["redrive.broker.back"]


@ANY_DATABASE
def test_broker_that_refuses_all_messages_is_not_logged_as_back(kit: Kit) -> None:
    class Full:
        def find_missing(self, messages: Any) -> set[str]:
            return {message.event_id for message in messages}

        def send(self, messages: Any) -> dict[str, Exception]:
            raise BrokerUnavailable("OOM command not allowed")

    dispatched(kit)
    one = redrive(kit, Full())
    with captured_lines() as lines:
        for _ in range(3):
            kit.advance(10)
            one.run()
        assert [line["event"] for line in lines() if "broker" in line["event"]] == ["redrive.broker.away"]


def test_refused_queue_does_not_delay_lost_messages_of_another(kit: Kit) -> None:
    refused = [dispatched(kit) for _ in range(3)]
    others = [dispatched(kit, job_type=BACKGROUND_TYPE) for _ in range(3)]
    kit.broker.lose_all()
    kit.broker.refuses = {"ai-interactive"}
    kit.advance(10)
    one = redrive(kit, page=2)
    with captured_lines() as lines:
        assert one.run() == 3
        outages = [line for line in lines() if line["event"] == "redrive.broker.away"]
    assert [(line["queueName"], line["cause"]) for line in outages] == [("ai-interactive", "refused")]
    assert [redrives(kit, job_id) for job_id in [*refused, *others]] == [0, 0, 0, 1, 1, 1]
    kit.broker.refuses = set()
    kit.advance(10)
    assert one.run() == 3
    assert kit.broker.pending_count("ai-interactive") == 3
