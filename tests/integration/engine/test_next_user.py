"""Fairness in a worker: if the user of a popped job has a fair share, another user's job runs first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from aijobs.engine.prepare import MAX_LOCK_ATTEMPTS
from aijobs.jobs.errors import AnotherUserNext, JobLockConflict
from aijobs.jobs.models import AiJob
from aijobs.monitor.check import Check
from aijobs.outbox.repository import outgoing
from aijobs.upkeep.dispatcher import OutboxDispatcher
from aijobs.wiring.passes import build_redrive
from tests.integration.engine.stage import Held, Stage
from tests.support.jobs import Kit

QUEUE = "ai-interactive"


def pop(stage: Stage) -> str:
    """Pop the queue's next message, run it as a worker does, and return the outcome."""
    message = stage.kit.broker.take(QUEUE)
    assert message is not None, "nothing waits"
    return stage.engine.execute(message)


def dispatch(kit: Kit) -> None:
    """Send all events and mark them published."""
    kit.advance(1)
    s = kit.services
    OutboxDispatcher(s.database, s.outbox_events, s.lifecycle, kit.broker, "dispatcher").cycle()


class Busy:
    """User `a` with a running job and a second one in the queue, and user `b` with a job behind that."""

    def __init__(self, stage: Stage) -> None:
        kit, self.held = stage.kit, Held()
        self.running = kit.new_job(user_id="a", job_type=stage.scripted(self.held)).id
        self.outcome: list[str] = []
        self.thread = threading.Thread(target=lambda: self.outcome.append(pop(stage)), daemon=True)
        self.thread.start()
        assert self.held.begun.wait(10)
        self.second = kit.new_job(user_id="a").id
        self.other = kit.new_job(user_id="b").id
        dispatch(kit)

    def end(self) -> None:
        self.held.go.set()
        self.thread.join(10)
        assert self.outcome == ["succeeded"]


def states(kit: Kit, *job_ids: str) -> list[str]:
    return [kit.job(job_id).lifecycle_status for job_id in job_ids]


def test_job_of_the_next_user_runs_and_the_popped_message_is_put_back(stage: Stage, log_lines: Any) -> None:
    kit, busy = stage.kit, Busy(stage)
    assert pop(stage) == "succeeded"
    assert states(kit, busy.running, busy.second, busy.other) == ["running", "queued", "succeeded"]
    events = {line["event"]: line for line in log_lines() if line.get("jobId") in (busy.second, busy.other)}
    assert events["job.turn_given"]["outboxId"] == kit.events(busy.second)[0].id
    locked = [line for line in log_lines() if line["event"] == "job.locked"][-1]
    assert (locked["jobId"], locked["outboxId"]) == (busy.other, kit.events(busy.other)[0].id)
    busy.end()
    kit.advance(600)
    assert build_redrive(kit.services).run() == 0, "nothing was lost"
    assert Check(kit.database, kit.clock, kit.broker).run().is_sound
    assert [pop(stage), pop(stage)] == ["succeeded", "not_taken"], "the second job of `a`, then the old message of `b`"
    assert states(kit, busy.second) == ["succeeded"]


def test_fairness_skips_jobs_of_unknown_types(sqlite_stage: Stage) -> None:
    kit, busy = sqlite_stage.kit, Busy(sqlite_stage)
    kit.set(busy.other, job_type="unheard_of")
    assert pop(sqlite_stage) == "succeeded"
    assert states(kit, busy.second, busy.other) == ["succeeded", "queued"]
    busy.end()


def test_popped_job_runs_if_another_worker_locks_the_other_job_first(
    sqlite_stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, busy = sqlite_stage.kit, Busy(sqlite_stage)
    real: Callable[..., AiJob] = kit.lifecycle.lock_job

    def lock(job_id: str, *arguments: Any, **options: Any) -> AiJob:
        if job_id == busy.other:
            monkeypatch.undo()
            real(job_id, "a faster worker")
        return real(job_id, *arguments, **options)

    monkeypatch.setattr(kit.lifecycle, "lock_job", lock)
    assert pop(sqlite_stage) == "succeeded"
    assert states(kit, busy.second, busy.other) == ["succeeded", "running"]
    busy.end()


def test_worker_stops_after_five_lock_attempts_and_puts_the_message_back(
    sqlite_stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, busy = sqlite_stage.kit, Busy(sqlite_stage)
    asked: list[str] = []

    def lock(job_id: str, *arguments: Any, **options: Any) -> AiJob:
        asked.append(job_id)
        if job_id == busy.second:
            raise AnotherUserNext(job_id, busy.other)
        raise JobLockConflict(job_id, "taken")

    with monkeypatch.context() as patched:
        patched.setattr(kit.lifecycle, "lock_job", lock)
        assert pop(sqlite_stage) == "not_taken"
    assert asked == [busy.second, busy.other, busy.second, busy.other, busy.second][:MAX_LOCK_ATTEMPTS]
    assert kit.broker.take(QUEUE).job_id == busy.second
    busy.end()


def test_redrive_sends_the_popped_message_that_could_not_be_put_back(
    sqlite_stage: Stage,
) -> None:
    kit, busy = sqlite_stage.kit, Busy(sqlite_stage)
    message = kit.broker.take(QUEUE)
    kit.broker.away = True
    assert sqlite_stage.engine.execute(message) == "succeeded"
    kit.broker.away = False
    assert states(kit, busy.second, busy.other) == ["queued", "succeeded"]
    busy.end()
    kit.advance(10)
    assert build_redrive(kit.services).run() == 1
    kit.broker.remove(outgoing(kit.events(busy.other)[0], kit.job(busy.other)))
    assert pop(sqlite_stage) == "succeeded"
    assert states(kit, busy.second) == ["succeeded"]


def test_long_queue_of_one_user_does_not_delay_another_on_two_slots(sqlite_stage: Stage) -> None:
    stage, kit = sqlite_stage, sqlite_stage.kit

    def script(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
        context.sleep(0.02)
        return {"output": {}, "artifacts": 0}

    job_type = stage.scripted(script)
    crowd = [kit.new_job(user_id="a", job_type=job_type).id for _ in range(16)]
    few = [kit.new_job(user_id="b", job_type=job_type).id for _ in range(3)]
    ended: list[str] = []
    kit.services.bus.subscribe("ai.job.completed", lambda event: ended.append(event.job_id))
    dispatch(kit)

    def work() -> None:
        while (message := kit.broker.take(QUEUE)) is not None:
            stage.engine.execute(message)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert set(states(kit, *crowd, *few)) == {"succeeded"}
    assert max(ended.index(job_id) for job_id in few) < 12, "16 messages of the other user came first"
    assert Check(kit.database, kit.clock, kit.broker).run().is_sound
