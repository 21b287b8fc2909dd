"""The database's clock jumps ten minutes forwards or backwards at any moment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from typing import Any

import pytest

from aijobs.errors import JobError
from aijobs.monitor.queues import QueueReads
from aijobs.queues.message import OutgoingMessage
from aijobs.upkeep.cleanup import SnapshotCleanup
from aijobs.upkeep.dispatcher import OutboxDispatcher
from aijobs.upkeep.reaper import LockReaper
from aijobs.web.console.strip import build_strip
from aijobs.web.factory import create_app
from tests.integration.engine.stage import CARDS, Held, open_stage
from tests.support.jobs import Kit
from tests.support.lines import captured_lines
from tests.support.polling import poll

STEP_S = 600
STEPS = pytest.mark.parametrize("step", [STEP_S, -STEP_S], ids=["on", "back"])
LEASE_LOST_S = 90
MOMENT_S = 0.001


def reaper(kit: Kit) -> LockReaper:
    return LockReaper(kit.database, kit.lifecycle)


def dispatcher(kit: Kit, broker: Any = None, name: str = "d1") -> OutboxDispatcher:
    services = kit.services
    return OutboxDispatcher(services.database, services.outbox_events, services.lifecycle, broker or kit.broker, name)


def unsent_job(kit: Kit) -> str:
    """Create a job whose message could not be handed over."""
    kit.broker.away = True
    job_id = kit.new_job().id
    kit.broker.away = False
    return job_id


# --- waiting times ---------------------------------------------------------------------------------------------------

Waiting = tuple[float, Callable[[], bool]]
"""The wait in seconds without a step, and a function that tries the action and returns whether it was due."""


def _new_job(kit: Kit) -> Waiting:
    job_id, one = unsent_job(kit), dispatcher(kit)
    return 1, lambda: one.cycle() == 1 and kit.lock(job_id).attempt_no == 1


def _retry(kit: Kit) -> Waiting:
    lease, one = kit.running(), dispatcher(kit)
    kit.lifecycle.release_for_retry(lease, kit.clock.at + timedelta(seconds=10))  # type: ignore[attr-defined]
    return 10, lambda: one.cycle() == 1 and kit.lock(lease.job_id).attempt_no == 2


def _claim_of_a_dead_dispatcher(kit: Kit) -> Waiting:
    unsent_job(kit)
    kit.advance(1)
    outbox, one = kit.services.outbox_events, dispatcher(kit)
    with kit.database.read() as session:
        found = outbox.find_dispatchable(session, 10, tried=False)
    kit.database.write(lambda s: outbox.claim(s, found, "dead/x"))
    return 60, lambda: (one.release_expired_claims(), one.cycle()) == (1, 1)


def _lease_of_a_dead_worker(kit: Kit) -> Waiting:
    kit.running()
    return LEASE_LOST_S, lambda: reaper(kit).reap() == 1


def _snapshot(kit: Kit) -> Waiting:
    kit.job_in("succeeded")
    kit.advance(timedelta(days=30).total_seconds() - 300)
    return 300, lambda: SnapshotCleanup(kit.database, kit.clock).run() == 1


@STEPS
@pytest.mark.parametrize(
    "begin",
    [_new_job, _retry, _claim_of_a_dead_dispatcher, _lease_of_a_dead_worker, _snapshot],
    ids=lambda begin: begin.__name__.strip("_").replace("_", " "),
)
def test_step_delays_nothing_by_more_than_itself(sqlite_kit: Kit, begin: Callable[[Kit], Waiting], step: float) -> None:
    seconds, try_it = begin(sqlite_kit)
    sqlite_kit.advance(step)
    left = seconds - step
    if left > 0:
        sqlite_kit.advance(left - MOMENT_S)
        assert not try_it(), "a step also brings nothing forward by more than itself"
        sqlite_kit.advance(MOMENT_S)
    assert try_it()


# --- live workers and dispatchers ------------------------------------------------------------------------------------


@STEPS
def test_live_worker_keeps_its_job_and_its_next_heartbeat_corrects_the_lease(sqlite_kit: Kit, step: float) -> None:
    kit, script = sqlite_kit, Held()
    with open_stage(kit) as stage:
        job_id = kit.new_job(job_type=stage.scripted(script)).id
        delivery = stage.start(job_id)
        assert script.begun.wait(10)
        kit.advance(step)
        whole = kit.clock.at + timedelta(seconds=60)  # type: ignore[attr-defined]
        poll(lambda: kit.job(job_id).lock_until == whole, what="the lease is a whole one again")
        assert reaper(kit).reap() == 0
        script.go.set()
        assert delivery.wait() == "succeeded", "the deadline doesn't depend on the database's clock"
    assert kit.types(job_id) == ["created", "locked", "succeeded"]


@STEPS
def test_lease_renewed_after_a_step_has_its_full_length(sqlite_kit: Kit, step: float) -> None:
    lease = sqlite_kit.running()
    sqlite_kit.advance(step)
    sqlite_kit.lifecycle.extend_lock(lease)
    sqlite_kit.advance(LEASE_LOST_S - MOMENT_S)
    assert reaper(sqlite_kit).reap() == 0
    sqlite_kit.advance(MOMENT_S)
    assert reaper(sqlite_kit).reap() == 1


def test_lease_that_a_step_took_from_a_live_worker_costs_a_run_but_doubles_no_result(sqlite_kit: Kit) -> None:
    """The reaper runs before the worker's next heartbeat."""
    kit, script = sqlite_kit, Held()
    with open_stage(kit) as stage:
        stage.engine.close()
        job_id = kit.new_job(job_type=stage.scripted(script)).id
        delivery = stage.start(job_id)
        assert script.begun.wait(10)
        kit.advance(STEP_S)
        assert reaper(kit).reap() == 1
        script.go.set()
        assert delivery.wait() == "lost"
        assert stage.run_to_end(job_id).lifecycle_status == "succeeded"
    assert kit.types(job_id) == ["created", "locked", "lease_lost", "locked", "succeeded"]
    assert len(kit.rows("ai_job_artifacts", job_id=job_id)) == kit.job(job_id).artifact_count == 1


class Meanwhile:
    """A broker that runs `action` between accepting messages and returning."""

    def __init__(self, broker: Any, action: Callable[[], None]) -> None:
        self._broker, self._action = broker, action

    def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
        failures: Mapping[str, Exception] = self._broker.send(messages)
        self._action()
        return failures


@STEPS
def test_dispatcher_publishes_once_if_the_clock_steps_during_its_send(sqlite_kit: Kit, step: float) -> None:
    kit, other = sqlite_kit, dispatcher(sqlite_kit, name="d2")
    job_id = unsent_job(kit)
    kit.advance(1)
    seen: list[Any] = []

    def step_and_let_another_pass() -> None:
        kit.advance(step)
        seen.extend((other.release_expired_claims(), other.cycle()))
        seen.append(kit.events(job_id)[0].published_at)
        kit.advance(1)

    assert dispatcher(kit, Meanwhile(kit.broker, step_and_let_another_pass)).cycle() == 1
    (event,) = kit.events(job_id)
    assert (event.status, event.locked_by) == ("published", None)
    assert kit.broker.pending_count("ai-interactive") == 1
    if step > 0:
        assert seen == [1, 1, event.published_at], "the claim looked expired, and its owner's late mark changes nothing"
    else:
        assert (seen, event.attempt_count) == ([0, 0, None], 1)


# --- durations -------------------------------------------------------------------------------------------------------


class EverEarlier(datetime):
    """Replaces the `datetime` of `utc_now`: each call is ten minutes earlier than the previous one."""

    looks = 0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        cls.looks += 1
        return datetime.now(tz) - cls.looks * timedelta(seconds=STEP_S)


def test_durations_are_never_negative_if_every_clock_goes_back(
    sqlite_kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = sqlite_kit
    monkeypatch.setattr("aijobs.clock.datetime", EverEarlier)

    def failing(_request: Any, _token: Any) -> str:
        kit.advance(-STEP_S)
        raise JobError("PROVIDER_UNAVAILABLE", "503")

    def answering(_request: Any, _token: Any) -> str:
        kit.advance(-STEP_S)
        return json.dumps(CARDS)

    with captured_lines() as lines, open_stage(kit) as stage:
        job_id = stage.new_cards(stage.asking(failing, answering))
        assert stage.run_to_end(job_id).lifecycle_status == "succeeded"
        logged = [line["durationMs"] for line in lines() if line.get("durationMs") is not None]
        latencies = [call["latency_ms"] for call in stage.usage(job_id)]
    history = kit.history(job_id)
    assert history[-1].at < history[0].at, "the clock went back"
    recorded = [(row.type, row.duration_ms) for row in history if row.duration_ms is not None]
    assert [kind for kind, _ in recorded] == ["retry_scheduled", "succeeded"]
    assert min(ms for _, ms in recorded) >= 0
    assert len(latencies) == 2
    assert min(latencies) >= 0
    assert min(logged) >= 0
    with create_app(services=kit.services).test_request_context():
        strip = build_strip(kit.services.monitor.get_detail(job_id), None, timedelta(seconds=30))
    assert min(station.took for station in strip if station.took is not None) >= timedelta()


class Nobody:
    """A heartbeat reader that finds no worker."""

    def read(self) -> list[Any]:
        return []


def test_ages_are_never_negative_after_a_step_back(sqlite_kit: Kit) -> None:
    unsent_job(sqlite_kit)
    sqlite_kit.advance(-STEP_S)
    with sqlite_kit.database.read() as session:
        queues = QueueReads(sqlite_kit.clock, sqlite_kit.broker, Nobody(), 30.0).read_statuses(session)
    assert {queue.queue_name: queue.oldest_age_s for queue in queues} == {"ai-interactive": 0, "ai-background": None}
    assert sqlite_kit.services.monitor.outbox_status().lag_s == 0
