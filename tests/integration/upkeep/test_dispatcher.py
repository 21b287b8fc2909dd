"""The dispatcher: it sends each event once, fails the job after three failed attempts, and waits for the broker."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import pytest
from sqlalchemy import event as sql_events
from sqlalchemy import func, insert, select
from sqlalchemy.exc import OperationalError

from aijobs import logs
from aijobs.db.clock import ManualClock
from aijobs.errors import BrokerUnavailable
from aijobs.ids import new_id
from aijobs.jobs.models import AiJob
from aijobs.outbox.models import OutboxEvent
from aijobs.outbox.repository import outgoing
from aijobs.queues.beat import BeatScheduler
from aijobs.queues.broker import RedisBroker, queue_key
from aijobs.queues.connection import ACL_RULES
from aijobs.queues.message import OutgoingMessage
from aijobs.upkeep.dispatcher import FRESH_S, TRIED_S, Backoff, OutboxDispatcher, hand_over
from tests.integration.engine.stage import CARDS, NOTES, Stage, open_stage
from tests.support.databases import ANY_DATABASE, OTHERS_LATER
from tests.support.effort import effort
from tests.support.jobs import BACKGROUND_TYPE, BEGIN, Kit, open_kit, prepare_database, race
from tests.support.lines import captured_lines
from tests.support.polling import poll
from tests.support.rows import build_event, build_job
from tests.support.servers import ValkeyServer


class Refusing:
    """A broker that refuses the messages of some jobs and records all messages."""

    def __init__(self, *job_ids: str, error: Exception | None = None) -> None:
        self.refused, self.error = set(job_ids), error or ValueError("secret text of a driver")
        self.sent: list[str] = []
        self.batches: list[list[str]] = []

    def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
        self.batches.append([one.message.job_id for one in messages])
        self.sent += [one.message.job_id for one in messages if one.message.job_id not in self.refused]
        return {one.event_id: self.error for one in messages if one.message.job_id in self.refused}


class Dying(Refusing):
    """A broker that kills the dispatcher when it sends the message of one of these jobs."""

    def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
        if self.refused & {one.message.job_id for one in messages}:
            raise KeyboardInterrupt
        return super().send(messages)


class DyingAfterwards:
    """A broker that kills the dispatcher after it has accepted the messages."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
        self._broker.send(messages)
        raise KeyboardInterrupt


def dispatcher(kit: Kit, broker: Any = None, name: str = "d1", **options: Any) -> OutboxDispatcher:
    """Return a dispatcher whose cycle ends only when no event is left, even on a slow machine."""
    services = kit.services
    options = {"fresh_s": 60, "tried_s": 60, **options}
    return OutboxDispatcher(
        services.database, services.outbox_events, services.lifecycle, broker or kit.broker, name, **options
    )


def waiting_jobs(kit: Kit, count: int, **changes: Any) -> list[str]:
    """Create jobs whose messages were not handed over."""
    kit.broker.away = True
    ids = [kit.new_job(**changes).id for _ in range(count)]
    kit.broker.away = False
    kit.advance(1)
    return ids


def claim_by_the_dead(kit: Kit) -> None:
    """Claim all due events in the name of a dispatcher that doesn't exist."""
    outbox = kit.services.outbox_events
    with kit.database.read() as session:
        found = outbox.find_dispatchable(session, 500, tried=False)
    kit.database.write(lambda s: outbox.claim(s, found, "dead/x"))


def the_event(kit: Kit, job_id: str) -> OutboxEvent:
    (event,) = kit.events(job_id, "ai.job.enqueue")
    return event


# --- success ---------------------------------------------------------------------------------------------------------


def test_due_events_are_sent_and_marked(kit: Kit) -> None:
    ids = waiting_jobs(kit, 3)
    assert dispatcher(kit).cycle() == 3
    assert kit.broker.pending_count("ai-interactive") == 3
    for job_id in ids:
        event = the_event(kit, job_id)
        assert (event.status, event.attempt_count, event.locked_by, event.last_error) == ("published", 1, None, None)
        assert event.published_at == event.last_sent_at == kit.clock.at  # type: ignore[attr-defined]
    assert dispatcher(kit).cycle() == 0


def test_four_dispatchers_send_each_of_a_thousand_events_once(live_kit: Kit) -> None:
    jobs = [build_job() for _ in range(1000)]
    with live_kit.database.transaction() as session:
        session.add_all(jobs)
        session.flush()
        session.execute(insert(OutboxEvent), [_enqueue(job) for job in jobs])
    brokers = [Refusing() for _ in range(4)]
    dispatchers = [dispatcher(live_kit, broker, f"d{n}") for n, broker in enumerate(brokers)]

    def until_done(one: OutboxDispatcher) -> None:
        while any(row["status"] != "published" for row in live_kit.rows("outbox_events")):
            one.cycle()

    assert race(*[lambda one=one: until_done(one) for one in dispatchers]) == [None] * 4
    sent = [job_id for broker in brokers for job_id in broker.sent]
    assert sorted(sent) == sorted(job.id for job in jobs)
    assert {row["attempt_count"] for row in live_kit.rows("outbox_events")} == {1}


def _enqueue(job: AiJob) -> dict[str, Any]:
    return {
        "id": new_id(),
        "event_type": "ai.job.enqueue",
        "aggregate_type": "AiJob",
        "aggregate_id": job.id,
        "dedupe_key": f"synthetic:u1:j={job.id}:1",
        "payload": {"jobId": job.id, "jobType": "synthetic", "queueName": "ai-interactive", "priority": 50},
        "queue_name": "ai-interactive",
        "status": "pending",
        "attempt_count": 0,
        "available_at": job.created_at,
        "message_version": 1,
        "message_key_id": "k1",
        "created_at": job.created_at,
        "redrives": 0,
    }


@ANY_DATABASE
def test_event_of_a_locked_job_is_not_dispatched(kit: Kit) -> None:
    claim = kit.running()
    kit.advance(1)
    assert dispatcher(kit).cycle() == 0
    assert the_event(kit, claim.job_id).status == "published"


def test_events_of_a_paused_queue_wait_and_others_are_sent(kit: Kit) -> None:
    held = waiting_jobs(kit, 2)
    (free,) = waiting_jobs(kit, 1, job_type=BACKGROUND_TYPE)
    kit.pause("ai-interactive")
    assert dispatcher(kit).cycle() == 1
    assert the_event(kit, free).status == "published"
    assert {the_event(kit, job_id).status for job_id in held} == {"pending"}
    assert {the_event(kit, job_id).attempt_count for job_id in held} == {0}


@ANY_DATABASE
def test_event_of_an_unknown_type_is_marked_published_unsent(kit: Kit) -> None:
    with kit.database.transaction() as session:
        session.add(build_event(build_job(created_at=BEGIN), event_type="x.y", status="pending", published_at=None))
    broker = Refusing()
    assert dispatcher(kit, broker).cycle() == 1
    (row,) = kit.rows("outbox_events")
    assert (row["status"], row["last_error"], row["last_sent_at"]) == ("published", "UNKNOWN_EVENT_TYPE", None)
    assert broker.batches == []
    assert dispatcher(kit, broker).cycle() == 0


@ANY_DATABASE
def test_end_event_is_marked_published_unsent(kit: Kit) -> None:
    job_id, _ = kit.job_in("failed")
    with kit.database.transaction() as session:
        stored = session.get_one(OutboxEvent, kit.events(job_id, "ai.job.failed")[0].id)
        stored.status = "pending"
    assert dispatcher(kit).cycle() == 1
    assert kit.events(job_id, "ai.job.failed")[0].status == "published"


# --- failed events ---------------------------------------------------------------------------------------------------


def test_refused_message_does_not_stop_the_rest_of_its_batch(kit: Kit) -> None:
    bad, *good = waiting_jobs(kit, 5)
    broker = Refusing(bad)
    assert dispatcher(kit, broker).cycle() == 5
    assert sorted(broker.sent) == sorted(good)
    assert {the_event(kit, job_id).status for job_id in good} == {"published"}
    event = the_event(kit, bad)
    assert (event.status, event.attempt_count, event.last_error) == ("pending", 1, "DISPATCH_FAILED: ValueError")
    assert event.available_at == kit.clock.at + timedelta(seconds=10)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dispatchers", [1, 12])
@ANY_DATABASE
def test_third_failure_after_10_and_20_seconds_ends_event_and_job(kit: Kit, dispatchers: int) -> None:
    (bad,) = waiting_jobs(kit, 1)
    broker = Refusing(bad)
    all_of_them = [dispatcher(kit, broker, f"d{n}") for n in range(dispatchers)]
    tried_at: list[int] = []
    for second in range(40):
        before = len(broker.batches)
        for one in all_of_them:
            one.cycle()
        tried_at += [second] * (len(broker.batches) - before)
        kit.advance(1)
    assert tried_at == [0, 10, 30]
    event, job = the_event(kit, bad), kit.job(bad)
    assert (event.status, event.attempt_count, event.last_error) == ("dead", 3, "DISPATCH_FAILED: ValueError")
    assert (job.lifecycle_status, job.error_code, job.attempt_no) == ("failed", "INTERNAL_NOT_DISPATCHED", 1)
    assert len({row.instance for row in kit.history(bad) if row.type in ("locked", "failed")}) == 1
    assert kit.types(bad) == ["created", "locked", "failed"]
    assert len(kit.events(bad, "ai.job.failed")) == 1
    assert kit.row(bad)["internal_error_message"] == "DISPATCH_FAILED: ValueError"


def test_second_dispatcher_does_not_claim_an_event_that_was_postponed_meanwhile(live_kit: Kit) -> None:
    """The second dispatcher found the event due; before it claims, the first one fails and postpones the event."""
    kit = live_kit
    (bad,) = _live_waiting(kit, 1)
    broker = Refusing(bad)
    outbox = kit.services.outbox_events
    with kit.database.read() as session:
        ids = outbox.find_dispatchable(session, 10, tried=False)
    assert dispatcher(kit, broker).cycle() == 1
    assert kit.database.write(lambda s: outbox.claim(s, ids, "d2/x")) == []


def _live_waiting(kit: Kit, count: int) -> list[str]:
    kit.broker.away = True
    ids = [kit.new_job().id for _ in range(count)]
    with kit.database.transaction() as session:
        for event in session.query(OutboxEvent):
            event.available_at = event.created_at
    return ids


def test_third_failure_does_not_end_a_job_that_a_worker_has_locked(kit: Kit) -> None:
    (job_id,) = waiting_jobs(kit, 1)
    broker = Refusing(job_id)
    for wait in (10, 20):
        dispatcher(kit, broker).cycle()
        kit.advance(wait)

    class Overtaken(Refusing):
        def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
            # A worker locks the job between the claim and the failure. The lock marks the event published, so this
            # test restores the claim to show that the job's state decides.
            lease = kit.lock(job_id)
            with kit.database.transaction() as session:
                stored = session.get_one(OutboxEvent, messages[0].event_id)
                stored.status, stored.locked_by = "processing", held[0].locked_by
            assert lease.attempt_no == 1
            return super().send(messages)

    held: list[OutboxEvent] = []
    one = dispatcher(kit, Overtaken(job_id))
    claim = kit.services.outbox_events.claim
    kit.services.outbox_events.claim = lambda *a: held.__iadd__(claim(*a))  # type: ignore[method-assign,assignment]
    try:
        one.cycle()
    finally:
        del kit.services.outbox_events.claim
    event = the_event(kit, job_id)
    assert (event.status, event.attempt_count) == ("published", 3)
    assert kit.job(job_id).lifecycle_status == "running"


def test_event_that_kills_its_dispatcher_is_dead_after_three_attempts_and_stops_no_other(kit: Kit) -> None:
    poison, *good = waiting_jobs(kit, 4)
    broker = Dying(poison)
    for _ in range(8):
        with pytest.raises(KeyboardInterrupt) if _claimable(kit, poison) else nullcontext():
            dispatcher(kit, broker, f"d{new_id()}").cycle()
        kit.advance(61)
        dispatcher(kit, Refusing()).release_expired_claims()
    event = the_event(kit, poison)
    assert (event.status, event.attempt_count) == ("dead", 3)
    assert kit.job(poison).error_code == "INTERNAL_NOT_DISPATCHED"
    assert {the_event(kit, job_id).status for job_id in good} == {"published"}
    assert sorted(broker.sent) == sorted(good)
    assert all(len(batch) == 1 for batch in broker.batches), "a retried event is sent alone"
    before = kit.everything()
    kit.advance(600)
    dispatcher(kit).release_expired_claims()
    dispatcher(kit).cycle()
    assert kit.everything() == before, "a dead event stays dead"


def test_cycle_ends_and_sends_retried_events_during_an_endless_flow_of_fresh_ones(
    kit: Kit,
) -> None:
    """Otherwise a dead dispatcher's events wait for ever, a busy one counts as overdue, and SIGTERM stops it during a
    claim.
    """

    class Flood(Refusing):
        """While it gets one batch, new events are created."""

        def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
            if len(self.batches) < 30:
                fresh.extend(waiting_jobs(kit, 2))
            return super().send(messages)

    assert FRESH_S + TRIED_S <= BeatScheduler.stop_wait_s / 2, "the last batch ends in time too"
    orphans = waiting_jobs(kit, 4)
    claim_by_the_dead(kit)
    kit.advance(61)
    fresh = waiting_jobs(kit, 2)
    broker = Flood()
    sender = dispatcher(kit, broker, batch=2, fresh_s=0, tried_s=0)
    assert sender.release_expired_claims() == 4
    assert [sender.cycle() for _ in range(5)] == [3, 3, 3, 3, 2]
    cycles = [[fresh[2 * n : 2 * n + 2], orphans[n : n + 1]] for n in range(4)]
    assert broker.batches == [*chain(*cycles), fresh[8:10]]


@pytest.mark.parametrize("tried", [False, True], ids=["fresh", "tried"])
def test_queue_paused_during_a_cycle_keeps_its_events(kit: Kit, tried: bool) -> None:
    class Pausing(Refusing):
        """While it gets the first batch, an operator pauses the queue."""

        def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
            if not self.batches:
                kit.pause("ai-interactive")
            return super().send(messages)

    ids = waiting_jobs(kit, 6)
    if tried:
        claim_by_the_dead(kit)
        kit.advance(61)
    broker = Pausing()
    sender = dispatcher(kit, broker, batch=6 if tried else 2)
    sender.release_expired_claims()
    sender.cycle()
    assert broker.sent == ids[: 1 if tried else 2]
    assert {the_event(kit, job_id).status for job_id in ids[2:]} == {"pending"}


@ANY_DATABASE
def test_cycle_counts_events_sent_before_the_broker_went_away(kit: Kit) -> None:
    class Leaving(Refusing):
        def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
            if len(self.batches) == 2:
                raise BrokerUnavailable("gone")
            return super().send(messages)

    waiting_jobs(kit, 2)
    claim_by_the_dead(kit)
    kit.advance(61)
    waiting_jobs(kit, 3)
    sender = dispatcher(kit, Leaving())
    assert sender.release_expired_claims() == 2
    assert sender.cycle() == 4, "three together, one alone, then the broker is away"


def _claimable(kit: Kit, job_id: str) -> bool:
    return the_event(kit, job_id).status == "pending"


@OTHERS_LATER
def test_dead_events_do_not_slow_down_polls_and_are_never_sent_again(
    create_database: Callable[..., str],
) -> None:
    """An earlier defect: each poll read all dead rows."""
    # A database of its own: dropping so many rows is faster than deleting, and no other reads are counted.
    with open_kit(create_database(prepare_database), clock=ManualClock(BEGIN)) as kit:
        broker = Refusing()
        one = dispatcher(kit, broker)

        def poll() -> None:
            assert one.release_expired_claims() == 5
            assert one.cycle() == 10

        def effort_of_a_poll() -> int:
            waiting_jobs(kit, 5)
            claim_by_the_dead(kit)
            kit.advance(60)
            waiting_jobs(kit, 5)
            return effort(kit.database.engine, poll)

        alone = effort_of_a_poll()
        with kit.database.transaction() as session:
            for status in ["dead"] * 4 + ["published"]:
                gone = {"status": status, "attempt_count": 3}
                session.execute(insert(OutboxEvent), [{**_enqueue(build_job()), **gone} for _ in range(5000)])
        kit.analyze("outbox_events")
        assert effort_of_a_poll() < 3 * alone
        with kit.database.read() as session:
            states = session.execute(select(OutboxEvent.status, func.count()).group_by(OutboxEvent.status)).all()
        assert dict(states) == {"dead": 20_000, "published": 5_020}
        assert len(broker.sent) == 20


# --- claims of dead dispatchers --------------------------------------------------------------------------------------


@ANY_DATABASE
def test_claims_of_a_dead_dispatcher_are_released_after_60_seconds(kit: Kit) -> None:
    ids = waiting_jobs(kit, 40)
    claim_by_the_dead(kit)
    running = dispatcher(kit, name="another", batch=15)
    kit.advance(59)
    assert (running.release_expired_claims(), running.cycle()) == (0, 0)
    kit.advance(1)
    assert running.release_expired_claims() == 40
    assert running.cycle() == 40
    assert kit.broker.pending_count("ai-interactive") == 40
    assert {the_event(kit, job_id).status for job_id in ids[:5]} == {"published"}


def test_release_of_an_expired_claim_does_not_end_a_job_whose_event_has_a_new_claim(kit: Kit) -> None:
    """The pass reads an expired claim; before it acts, the event is released and claimed by another dispatcher."""
    (job_id,) = waiting_jobs(kit, 1)
    outbox = kit.services.outbox_events
    event_id = the_event(kit, job_id).id
    for _ in range(3):
        kit.database.write(lambda s: outbox.claim(s, [event_id], "d1/a"))
        if the_event(kit, job_id).attempt_count < 3:
            kit.database.write(lambda s: outbox.release_claims(s, [event_id], "d1/a", counted=True))
    kit.advance(61)
    stale = the_event(kit, job_id)
    kit.database.write(lambda s: outbox.release_claims(s, [event_id], "d1/a", counted=False))
    kit.database.write(lambda s: outbox.claim(s, [event_id], "d2/b"))
    assert dispatcher(kit)._release(stale) == 0
    assert kit.job(job_id).lifecycle_status == "queued"
    assert (the_event(kit, job_id).status, the_event(kit, job_id).locked_by) == ("processing", "d2/b")


# --- dispatchers that die after sending ------------------------------------------------------------------------------


def _sent_by_the_dead(kit: Kit, stage: Stage) -> str:
    """Create a job whose message is in the queue and whose dispatcher died before it marked the event published."""
    (job_id,) = waiting_jobs(kit, 1, job_type=stage.asking(CARDS), input=NOTES)
    with pytest.raises(KeyboardInterrupt):
        dispatcher(kit, DyingAfterwards(kit.broker), "dead").cycle()
    assert the_event(kit, job_id).status == "processing"
    return job_id


def _ran_once(kit: Kit, stage: Stage, job_id: str) -> None:
    assert len(stage.provider.requests) == 1
    assert kit.types(job_id) == ["created", "locked", "provider_called", "output_saved", "succeeded"]
    assert [event.event_type for event in kit.events(job_id)] == ["ai.job.enqueue", "ai.job.completed"]
    assert len(kit.rows("ai_job_artifacts", job_id=job_id)) == kit.job(job_id).artifact_count == len(CARDS["cards"])


def test_dispatcher_that_dies_after_sending_causes_a_second_message_but_one_run(kit: Kit) -> None:
    with open_stage(kit) as stage:
        job_id = _sent_by_the_dead(kit, stage)
        first = kit.broker.take("ai-background")
        kit.advance(60)
        other = dispatcher(kit, name="d2")
        assert (other.release_expired_claims(), other.cycle()) == (1, 1)
        second = kit.broker.take("ai-background")
        assert first is not None
        assert first == second, "the two are equal"
        published = the_event(kit, job_id)
        assert (published.status, published.attempt_count) == ("published", 2)
        kit.advance(1)
        outcomes = race(lambda: stage.engine.execute(first), lambda: stage.engine.execute(second))
        assert sorted(outcomes) == ["not_taken", "succeeded"]
        _ran_once(kit, stage, job_id)
        assert the_event(kit, job_id).published_at == published.published_at, "published once"


def test_message_is_not_sent_again_if_the_job_is_locked_before_the_claim_expires(kit: Kit) -> None:
    other = dispatcher(kit, name="d2")
    states: list[tuple[str, str | None]] = []
    sent_again: list[int] = []

    def answer(_request: Any, _token: Any) -> str:
        """Let the claim expire during the provider call."""
        event = the_event(kit, job_id)
        states.append((event.status, event.locked_by))
        kit.advance(61)
        sent_again.extend((other.release_expired_claims(), other.cycle()))
        return json.dumps(CARDS)

    with open_stage(kit) as stage:
        job_id = _sent_by_the_dead(kit, stage)
        stage.provider.answers[:] = [answer]
        assert stage.engine.execute(kit.broker.take("ai-background")) == "succeeded"
        sent_again.extend((other.release_expired_claims(), other.cycle()))
        assert (states, sent_again) == ([("published", None)], [0, 0, 0, 0])
        assert kit.broker.pending_count("ai-background") == 0
        _ran_once(kit, stage, job_id)


# --- broker outages --------------------------------------------------------------------------------------------------


@ANY_DATABASE
def test_broker_outage_uses_up_no_attempts(kit: Kit) -> None:
    ids = waiting_jobs(kit, 3)
    kit.broker.away = True
    for n in range(20):
        assert dispatcher(kit, name=f"d{n}").cycle() == 0
        kit.advance(60)
        dispatcher(kit).release_expired_claims()
    for job_id in ids:
        event = the_event(kit, job_id)
        assert (event.status, event.attempt_count, event.locked_by, event.last_error) == ("pending", 0, None, None)
    kit.broker.away = False
    assert dispatcher(kit).cycle() == 3
    assert {kit.job(job_id).lifecycle_status for job_id in ids} == {"queued"}


@ANY_DATABASE
def test_attempt_count_of_a_failed_event_stays_during_a_broker_outage(kit: Kit) -> None:
    (job_id,) = waiting_jobs(kit, 1)
    dispatcher(kit, Refusing(job_id)).cycle()
    kit.advance(10)
    kit.broker.away = True
    for n in range(5):
        dispatcher(kit, name=f"d{n}").cycle()
    assert the_event(kit, job_id).attempt_count == 1
    kit.broker.away = False
    assert dispatcher(kit).cycle() == 1


@ANY_DATABASE
def test_dispatcher_backs_off_during_a_broker_outage_and_recovers(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("aijobs.upkeep.dispatcher.time.monotonic", lambda: now[0])
    waiting_jobs(kit, 1)
    kit.broker.away = True
    one, asked = dispatcher(kit), []
    for _ in range(60):
        before = kit.broker.sent
        one.cycle()
        asked += [now[0] - 100] * (kit.broker.sent - before)
        now[0] += 1
    assert asked == [0, 1, 3, 7, 15, 30, 45]
    kit.broker.away = False
    now[0] += 15
    assert one.cycle() == 1


def test_backoff_starts_again_after_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("aijobs.upkeep.dispatcher.time.monotonic", lambda: now[0])
    backoff = Backoff()
    assert backoff.is_over
    backoff.lengthen()
    backoff.lengthen()
    now[0] = 1.9
    assert not backoff.is_over
    backoff.reset()
    assert backoff.is_over
    backoff.lengthen()
    now[0] += 1
    assert backoff.is_over


# --- database errors at one event ------------------------------------------------------------------------------------


def _failing_for(kit: Kit, part: str) -> Any:
    """Return a context in which updates with `part` in their parameters fail."""

    @contextmanager
    def failing() -> Any:
        def refuse(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
            if statement.startswith("UPDATE") and part in str(parameters):
                raise OperationalError(statement, {}, Exception("disk I/O error"))

        sql_events.listen(kit.database.engine, "before_cursor_execute", refuse)
        try:
            yield
        finally:
            sql_events.remove(kit.database.engine, "before_cursor_execute", refuse)

    return failing()


@ANY_DATABASE
def test_database_error_at_one_failed_event_stops_no_other(kit: Kit) -> None:
    bad = waiting_jobs(kit, 3)
    broker = Refusing(*bad)
    one = dispatcher(kit, broker)
    failing = the_event(kit, bad[0]).id

    def fails(session: Any, event: OutboxEvent, *rest: Any) -> int:
        if event.id == failing:
            raise OperationalError("UPDATE", {}, Exception("disk I/O error"))
        return mark(session, event, *rest)

    mark = kit.services.outbox_events.mark_failed
    kit.services.outbox_events.mark_failed = fails  # type: ignore[method-assign]
    try:
        one.cycle()
    finally:
        del kit.services.outbox_events.mark_failed
    assert [the_event(kit, job_id).status for job_id in bad] == ["processing", "pending", "pending"]
    kit.advance(60)
    assert one.release_expired_claims() == 1


@ANY_DATABASE
def test_claim_that_cannot_be_released_stops_no_other(kit: Kit) -> None:
    ids = waiting_jobs(kit, 5)
    claim_by_the_dead(kit)
    kit.advance(61)
    with _failing_for(kit, the_event(kit, ids[0]).id):
        assert dispatcher(kit, batch=2).release_expired_claims() == 4
    assert [the_event(kit, job_id).status for job_id in ids] == ["processing"] + ["pending"] * 4


@ANY_DATABASE
def test_broker_is_logged_as_back_only_after_a_cycle_that_sent_something(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "is_over", True)
    (waiting,) = waiting_jobs(kit, 1)
    one = dispatcher(kit)
    with captured_lines() as lines:
        kit.broker.away = True
        assert one.cycle() == 0
        with kit.database.transaction() as session:
            stored = session.get_one(OutboxEvent, the_event(kit, waiting).id)
            stored.event_type = "ai.job.odd"
        assert one.cycle() == 1, "it was marked published without the broker"
        assert [line["event"] for line in lines() if "broker" in line["event"]] == ["dispatcher.broker.away"]
        waiting_jobs(kit, 1)
        assert one.cycle() == 1
        assert [line["event"] for line in lines() if "dispatcher.b" in line["event"]][1:] == ["dispatcher.broker.back"]


# --- hand-over by the creator ----------------------------------------------------------------------------------------


class Broken:
    """A broker whose `send` raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
        self.asked += 1
        raise self.error


@ANY_DATABASE
def test_message_is_handed_over_after_the_commit(kit: Kit) -> None:
    seen: list[int] = []
    send = kit.broker.send
    kit.broker.send = lambda messages: (seen.append(len(kit.rows("ai_jobs"))), send(messages))[1]
    job = kit.new_job()
    assert seen == [1], "the job is committed when its message is sent"
    message = kit.broker.take("ai-interactive")
    assert message is not None
    assert message.job_id == job.id
    assert the_event(kit, job.id).status == "pending", "the hand-over marks nothing"


@ANY_DATABASE
def test_rolled_back_job_sends_no_message(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("between the inserts")

    monkeypatch.setattr(kit.services.outbox_events, "enqueue_row", fails)
    with pytest.raises(RuntimeError):
        kit.new_job()
    assert kit.broker.pending_count("ai-interactive") == 0
    assert kit.counts().get("ai_jobs") is None


@ANY_DATABASE
def test_dispatcher_sends_no_second_message_after_the_hand_over(kit: Kit) -> None:
    kit.new_job()
    kit.advance(1)
    assert dispatcher(kit).cycle() == 1
    assert kit.broker.pending_count("ai-interactive") == 1


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), RuntimeError("a bug"), OSError()], ids=repr)
@ANY_DATABASE
def test_hand_over_error_is_hidden_from_the_creator_and_pauses_hand_over_for_five_seconds(
    kit: Kit, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("aijobs.upkeep.dispatcher.time.monotonic", lambda: now[0])
    broker = Broken(error)
    send = hand_over(broker)  # type: ignore[arg-type]
    message = _message(kit)
    for second, asked in ((0, 1), (1, 1), (4.9, 1), (5.1, 2), (6, 2)):
        now[0] = 100 + second
        send(message)
        assert broker.asked == asked


@ANY_DATABASE
def test_internal_error_in_the_hand_over_is_not_logged_as_a_broker_outage(kit: Kit) -> None:
    send = hand_over(Broken(TypeError("mine")))  # type: ignore[arg-type]
    message = _message(kit)
    with captured_lines() as lines:
        send(message)
        (line,) = lines()
    assert (line["event"], line["level"], line["error"]) == ("handover.failed", "error", "TypeError")
    assert line["jobId"] == message.message.job_id
    assert " send" in line["where"][-1]


def _message(kit: Kit) -> OutgoingMessage:
    job = kit.new_job()
    return outgoing(the_event(kit, job.id), job)


@ANY_DATABASE
def test_dispatcher_log_has_no_error_text(kit: Kit) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure("DEBUG", stream=stream)
    try:
        (bad,) = waiting_jobs(kit, 1)
        dispatcher(kit, Refusing(bad)).cycle()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (failed,) = [line for line in lines if line["event"] == "outbox.dispatch_failed"]
    assert failed["level"] == "warning"
    assert set(logs.JOB_KEYS) <= set(failed)
    assert "secret text" not in stream.getvalue()


# --- refused queues --------------------------------------------------------------------------------------------------


@ANY_DATABASE
def test_refused_queue_does_not_delay_events_of_another(kit: Kit) -> None:
    refused = waiting_jobs(kit, 150)
    others = waiting_jobs(kit, 3, job_type=BACKGROUND_TYPE)
    kit.broker.refuses = {"ai-interactive"}
    one = dispatcher(kit)
    with captured_lines() as lines:
        assert one.cycle() == 3
        assert one.cycle() == 0
        outages = [line for line in lines() if line["event"] == "dispatcher.broker.away"]
    assert kit.broker.pending_count("ai-background") == 3
    assert {the_event(kit, job_id).status for job_id in others} == {"published"}
    states = {(event.status, event.attempt_count, event.locked_by) for event in map(partial(the_event, kit), refused)}
    assert states == {("pending", 0, None)}, "the attempt isn't counted"
    assert [(line["queueName"], line["cause"]) for line in outages] == [("ai-interactive", "refused")]

    kit.broker.refuses = set()
    with captured_lines() as lines:
        assert poll(one.cycle, what="the queue is tried again") == 150
        assert [line["queueName"] for line in lines() if line["event"] == "dispatcher.broker.back"] == [
            "ai-interactive"
        ]
    assert kit.broker.pending_count("ai-interactive") == 150


@ANY_DATABASE
def test_refused_queue_does_not_delay_retried_events_of_another(kit: Kit) -> None:
    jobs = [*waiting_jobs(kit, 2), *waiting_jobs(kit, 2, job_type=BACKGROUND_TYPE)]
    claim_by_the_dead(kit)
    kit.advance(61)
    assert dispatcher(kit).release_expired_claims() == 4
    kit.broker.refuses = {"ai-interactive"}
    assert dispatcher(kit).cycle() == 2
    assert [the_event(kit, job_id).status for job_id in jobs] == ["pending", "pending", "published", "published"]
    assert [the_event(kit, job_id).attempt_count for job_id in jobs] == [1, 1, 2, 2]


@ANY_DATABASE
def test_creator_hands_over_to_another_queue_while_one_is_refused(kit: Kit) -> None:
    kit.broker.refuses = {"ai-interactive"}
    kit.new_job()
    kit.new_job(job_type=BACKGROUND_TYPE)
    assert kit.broker.pending_count("ai-background") == 1


@ANY_DATABASE
@pytest.mark.parametrize("way", ["another kind", "no right"])
def test_queue_that_redis_refuses_waits_alone_and_is_sent_afterwards(
    kit: Kit, start_valkey: Callable[..., ValkeyServer], way: str
) -> None:
    server = start_valkey(f"user aijobs on >secret {ACL_RULES}")
    broker = RedisBroker.at(server.url_for("aijobs", "secret"), kit.services.settings.message_keys)
    refused = waiting_jobs(kit, 5)
    waiting_jobs(kit, 5, job_type=BACKGROUND_TYPE)
    key = queue_key("ai-interactive")
    with server.client() as admin:
        if way == "another kind":
            admin.set(key, "somebody else's")
        else:
            admin.execute_command("ACL", "SETUSER", "aijobs", "resetkeys", "~huey.redis.aijobs_background")
        one = dispatcher(kit, broker)
        assert one.cycle() == 5
        assert broker.pending_count("ai-background") == 5
        assert {the_event(kit, job_id).attempt_count for job_id in refused} == {0}
        if way == "another kind":
            admin.delete(key)
        else:
            admin.execute_command("ACL", "SETUSER", "aijobs", *ACL_RULES.split())
        assert poll(one.cycle, what="the queue is tried again") == 5
        assert admin.zcard(key) == 5
