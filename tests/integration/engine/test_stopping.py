"""Deadlines, cancels, takeovers and shutdown: an attempt ends in time, whatever its code does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from aijobs.definitions.projector import ProjectionResult
from aijobs.engine.run import Run
from aijobs.engine.token import LOST, RELEASED, TIMEOUT
from aijobs.errors import JobError
from aijobs.jobs.lease import lease_of
from tests.integration.engine.stage import CARDS, Held, Stage, open_stage
from tests.support.databases import ANY_DATABASE, SERVERS
from tests.support.jobs import STUBBORN_TYPE, Kit
from tests.support.polling import poll


@pytest.fixture
def hasty_stage(sqlite_kit: Kit) -> Iterator[Stage]:
    """Open a stage whose watcher treats code as stuck 0.3 s after the end of its attempt."""
    with open_stage(sqlite_kit, stuck_s=0.3) as opened:
        yield opened


def sleeping(seconds: float = 60) -> Callable[..., dict[str, Any]]:
    def script(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
        context.sleep(seconds)
        return {"output": {}, "artifacts": 1}

    return script


# --- deadlines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "attempts"), [("fail", 1), ("retry", 3)])
def test_timeout_is_retried_only_if_the_definition_says_so(sqlite_stage: Stage, strategy: str, attempts: int) -> None:
    job_type = sqlite_stage.scripted(sleeping(), timeout_ms=1000, max_retries=2, abort_strategy=strategy)
    job = sqlite_stage.run_to_end(sqlite_stage.kit.new_job(job_type=job_type).id)
    assert (job.lifecycle_status, job.error_code, job.attempt_no) == ("failed", "TIMEOUT", attempts)


@pytest.mark.parametrize("strategy", ["fail", "retry"])
def test_timeout_is_logged_as_a_warning_with_its_limit(sqlite_stage: Stage, log_lines: Any, strategy: str) -> None:
    job_type = sqlite_stage.scripted(sleeping(), timeout_ms=1000, max_retries=1, abort_strategy=strategy)
    sqlite_stage.run_to_end(sqlite_stage.kit.new_job(job_type=job_type).id)
    lines = [line for line in log_lines() if line["event"] == "job.timed_out"]
    assert len(lines) == (2 if strategy == "retry" else 1)
    assert {(line["level"], line["errorCode"], line["limitMs"]) for line in lines} == {("warning", "TIMEOUT", 1000)}


@ANY_DATABASE
def test_slot_is_free_after_the_deadline_of_code_that_ignores_its_token(stage: Stage) -> None:
    script = Held()
    job_id = stage.kit.new_job(job_type=stage.scripted(script, timeout_ms=1000, abort_strategy="fail")).id
    assert stage.run(job_id) == "failed"
    ended = stage.kit.everything()
    assert stage.kit.job(job_id).error_code == "TIMEOUT"
    assert stage.run(stage.kit.new_job().id) == "succeeded", "the slot takes the next job"
    script.go.set()
    poll(lambda: not stage.active.all(), what="the code returned")
    assert stage.kit.row(job_id) == next(row for row in ended["ai_jobs"] if row["id"] == job_id)
    assert stage.kit.rows("ai_job_artifacts", job_id=job_id) == []
    assert stage.kit.types(job_id) == ["created", "locked", "failed"]


@ANY_DATABASE
def test_late_answer_is_not_saved_but_its_cost_is(stage: Stage) -> None:
    begun, go = threading.Event(), threading.Event()

    def answer(request: Any, token: Any) -> str:
        begun.set()
        assert go.wait(30)
        return '{"cards": []}'

    job_id = stage.new_cards(stage.asking(answer, timeout_ms=1000, abort_strategy="fail"))
    delivery = stage.start(job_id)
    assert begun.wait(10)
    assert delivery.wait() == "failed"
    (at_once,) = stage.usage(job_id)
    assert (at_once["state"], at_once["error_code"]) == ("failed", "TIMEOUT")
    go.set()
    poll(lambda: not stage.active.all(), what="the code returned")
    (late,) = stage.usage(job_id)
    assert (late["state"], late["error_code"], late["billed"]) == ("failed", "TIMEOUT", "yes")
    assert (late["prompt_tokens"], late["completion_tokens"]) == (100, 50), "the cost is recorded"
    row = stage.kit.row(job_id)
    assert (row["lifecycle_status"], row["validated_output"], row["output_hash"]) == ("failed", None, None)


@ANY_DATABASE
def test_lease_is_not_renewed_after_the_deadline(stage: Stage) -> None:
    script = Held()
    job_id = stage.kit.new_job(job_type=stage.scripted(script, timeout_ms=1000, abort_strategy="retry", delay=5000)).id
    delivery = stage.start(job_id)
    assert script.begun.wait(10)
    stage.kit.advance(30)
    renewed = stage.kit.services.clock.at + timedelta(seconds=60)  # type: ignore[attr-defined]
    poll(lambda: stage.kit.job(job_id).lock_until == renewed, what="the lease is renewed while the attempt may run")
    delivery.wait()
    stage.kit.advance(3)
    job = stage.kit.job(job_id)
    assert (job.locked_by, job.lock_until) == (None, None), "hung code keeps no lease"
    script.go.set()


def test_stuck_code_makes_the_process_abandon_and_release_other_leases(hasty_stage: Stage) -> None:
    stage, script = hasty_stage, Held()
    stuck = stage.kit.new_job(job_type=stage.scripted(script, timeout_ms=1000, abort_strategy="fail")).id
    stage.run(stuck)
    other = stage.start(stage.kit.new_job(job_type=stage.scripted(sleeping())).id)
    assert stage.abandoned.wait(10), "`abandon` was not called"
    assert other.wait() == "released", "the other lease is released first"
    assert stage.run(stage.kit.new_job().id) == "put_back"
    script.go.set()


class HeldProjector:
    """A projector that runs until `go` is set, in the transaction that locks the job's row."""

    key = "held"

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def project(self, session: Any, job: Any, validated_output: Any) -> ProjectionResult:
        self.begun.set()
        assert self.go.wait(60), "`go` was not set"
        return ProjectionResult([])


def answering(*_: Any) -> dict[str, Any]:
    return {"output": {}, "artifacts": 0}


def test_hanging_projector_makes_the_process_abandon(kit: Kit) -> None:
    projector = HeldProjector()
    with open_stage(kit, stuck_s=0.3) as stage:
        job_type = stage.scripted(answering, projector=projector, timeout_ms=1000)
        delivery = stage.start(stage.kit.new_job(job_type=job_type).id)
        assert projector.begun.wait(10)
        assert not stage.abandoned.is_set(), "the deadline isn't over"
        assert stage.abandoned.wait(10), "`abandon` was not called"
        projector.go.set()
        assert delivery.wait() == "succeeded", "it ended before the process did"


@SERVERS
@pytest.mark.parametrize("timeout_ms", [60_000, 1000], ids=["with renewals due", "after its deadline"])
def test_slow_projection_does_not_delay_the_cancel_of_another_run(stage: Stage, timeout_ms: int) -> None:
    projector = HeldProjector()
    slow = stage.start(
        stage.kit.new_job(job_type=stage.scripted(answering, projector=projector, timeout_ms=timeout_ms)).id
    )
    assert projector.begun.wait(10)
    time.sleep(1.2)  # Until a renewal is due, or the deadline is over.
    job_id = stage.kit.new_job(job_type=stage.scripted(sleeping())).id
    other = stage.start(job_id)
    poll(lambda: stage.kit.job(job_id).locked_by, what="the job was taken")
    stage.kit.lifecycle.request_cancel(job_id, "user:u1")
    assert other.wait() == "cancelled"
    projector.go.set()
    assert slow.wait() == "succeeded"


@ANY_DATABASE
def test_attempt_without_a_thread_releases_its_lease(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = stage.kit.new_job().id
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("attempt-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert stage.run(job_id) == "put_back"
    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.locked_by, job.lost_count, job.retry_count) == ("running", None, 0, 0)
    assert (stage.active.all(), stage.presence.seen) == ([], [])
    assert stage.run(job_id) == "succeeded"


def test_process_does_not_abandon_if_the_code_returns_in_time(hasty_stage: Stage) -> None:
    job_type = hasty_stage.scripted(sleeping(), timeout_ms=1000, abort_strategy="fail")
    hasty_stage.run(hasty_stage.kit.new_job(job_type=job_type).id)
    assert not hasty_stage.abandoned.wait(1)


# --- cancels -------------------------------------------------------------------------------------------------------


@ANY_DATABASE
@pytest.mark.parametrize("hinted", [True, False], ids=["with a hint", "by the database alone"])
def test_running_job_is_cancelled_while_its_code_sleeps(stage: Stage, hinted: bool) -> None:
    job_id = stage.kit.new_job(job_type=stage.scripted(sleeping())).id
    delivery = stage.start(job_id)
    poll(lambda: stage.kit.job(job_id).locked_by, what="the job was taken")
    if hinted:
        stage.kit.jobs.cancel(job_id, "user:u1")
    else:
        stage.kit.lifecycle.request_cancel(job_id, "user:u1")
    assert delivery.wait() == "cancelled"
    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.error_code, job.locked_by) == ("cancelled", None, None)
    assert stage.kit.types(job_id) == ["created", "locked", "cancel_requested", "cancelled"]
    assert [e.event_type for e in stage.kit.events(job_id)][1:] == ["ai.job.cancelled"]


@ANY_DATABASE
def test_cancel_frees_the_slot_while_the_code_runs_on(stage: Stage) -> None:
    script = Held()
    job_id = stage.kit.new_job(job_type=stage.scripted(script)).id
    delivery = stage.start(job_id)
    assert script.begun.wait(10)
    stage.kit.jobs.cancel(job_id, "user:u1")
    assert delivery.wait() == "cancelled"
    script.go.set()
    poll(lambda: not stage.active.all(), what="the code returned")
    assert stage.kit.job(job_id).lifecycle_status == "cancelled"
    assert stage.kit.rows("ai_job_artifacts", job_id=job_id) == []


@ANY_DATABASE
def test_call_of_a_cancelled_job_is_closed_without_a_second_call(stage: Stage) -> None:
    def answer(request: Any, token: Any) -> str:
        token.sleep(60)
        raise AssertionError("unreachable")

    job_id = stage.new_cards(stage.asking(answer))
    delivery = stage.start(job_id)
    poll(lambda: stage.provider.requests, what="the call left")
    stage.kit.jobs.cancel(job_id, "user:u1")
    assert delivery.wait() == "cancelled"
    (call,) = stage.usage(job_id)
    assert (call["state"], call["error_code"]) == ("failed", "CANCELLED")


class _Cancelling:
    """Requests a cancel at one step of an attempt, in the attempt's own thread."""

    def __init__(self, stage: Stage, job_id: str) -> None:
        self._stage, self._job_id = stage, job_id

    def __call__(self, *_: Any, **__: Any) -> None:
        self._stage.kit.lifecycle.request_cancel(self._job_id, "user:u1")


@pytest.mark.parametrize("step", ["before the call", "within the call", "after the output", "within the projection"])
def test_acknowledged_cancel_wins_at_every_step(stage: Stage, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.engine.close()  # Without the watcher: the steps themselves must see the cancel.
    job_id = stage.new_cards(stage.asking(CARDS))
    cancel = _Cancelling(stage, job_id)
    if step == "before the call":
        resolve = stage.engine._attempts._resolve.resolve
        monkeypatch.setattr(stage.engine._attempts._resolve, "resolve", lambda run: (cancel(), resolve(run))[1])
    elif step == "within the call":
        stage.provider.answers[:] = [lambda request, token: (cancel(), '{"cards": []}')[1]]
    elif step == "after the output":
        project = stage.engine._attempts._project.project
        monkeypatch.setattr(stage.engine._attempts._project, "project", lambda run: (cancel(), project(run))[1])
    else:
        lock_row = stage.kit.lifecycle.lock_row
        asked: list[threading.Thread] = []

        def locked(session: Any, lease: Any) -> Any:
            job = lock_row(session, lease)
            # It waits for the row's lock, so it comes after the success and changes nothing.
            asked.append(threading.Thread(target=cancel))
            asked[0].start()
            return job

        monkeypatch.setattr(stage.kit.lifecycle, "lock_row", locked)
    outcome = stage.run(job_id)
    job = stage.kit.job(job_id)
    if step == "within the projection":
        asked[0].join(20)
        job = stage.kit.job(job_id)
        assert (outcome, job.lifecycle_status, job.cancel_requested_at) == ("succeeded", "succeeded", None)
        return
    assert (outcome, job.lifecycle_status) == ("cancelled", "cancelled")
    assert stage.kit.rows("flashcards", job_id=job_id) == []
    assert stage.kit.rows("ai_job_artifacts", job_id=job_id) == []
    assert len(stage.provider.requests) == (0 if step == "before the call" else 1)
    assert all(call["state"] in ("done", "failed") for call in stage.usage(job_id)), "no call is left open"


@ANY_DATABASE
def test_cancel_wins_over_failure_and_retry(stage: Stage) -> None:
    running: list[str] = []

    def failing_with(code: str) -> Callable[..., dict[str, Any]]:
        def script(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
            stage.kit.lifecycle.request_cancel(running[-1], "user:u1")
            raise JobError(code)

        return script

    for code in ("PROVIDER_UNAVAILABLE", "CONTENT_SAFETY_BLOCKED"):
        running.append(stage.kit.new_job(job_type=stage.scripted(failing_with(code))).id)
        assert stage.run(running[-1]) == "cancelled"
        assert stage.kit.job(running[-1]).error_code is None


@ANY_DATABASE
def test_job_waiting_for_its_retry_is_cancelled_at_once(stage: Stage) -> None:
    job_id = stage.kit.new_job({"raise": "PROVIDER_UNAVAILABLE"}).id
    stage.run(job_id)
    stage.kit.jobs.cancel(job_id, "user:u1")
    assert stage.kit.job(job_id).lifecycle_status == "cancelled"
    stage.kit.advance(60)
    assert stage.run(job_id) == "not_taken"


def test_type_that_is_not_cancellable_runs_to_its_end(sqlite_stage: Stage) -> None:
    job = sqlite_stage.kit.new_job(job_type=STUBBORN_TYPE)
    assert sqlite_stage.run(job.id) == "succeeded"


# --- takeovers -----------------------------------------------------------------------------------------------------


def _take_over(stage: Stage, job_id: str, instance: str = "worker-2") -> Any:
    """Take the job as the reaper and another worker do if this worker is considered lost."""
    job = stage.kit.job(job_id)
    assert job.lock_until is not None
    stage.kit.lifecycle.expire(lease_of(job), job.lock_until, at_once=True)
    return stage.kit.lock(job_id, instance)


def test_worker_stops_and_writes_nothing_after_its_lease_is_taken_over(stage: Stage) -> None:
    seen: list[str] = []

    def script(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
        try:
            context.sleep(60)
        except JobError as stopped:
            seen.append(stopped.code)
            raise
        raise AssertionError("unreachable")

    job_id = stage.kit.new_job(job_type=stage.scripted(script)).id
    delivery = stage.start(job_id)
    poll(lambda: stage.kit.job(job_id).locked_by, what="the job was taken")
    newer = _take_over(stage, job_id)
    before = stage.kit.row(job_id)
    assert delivery.wait() == "lost"
    # The slot is free before the attempt's thread notices.
    assert poll(lambda: seen, what="the script was stopped") == ["LOCK_LOST"]
    assert stage.kit.row(job_id) == before
    stage.kit.lifecycle.mark_succeeded(newer)
    assert stage.kit.types(job_id) == ["created", "locked", "lease_lost", "locked", "succeeded"]


class LateAnswer:
    """A provider's answer that arrives when `go` is set."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, request: Any, token: Any) -> str:
        self.begun.set()
        assert self.go.wait(30)
        return self._text


@ANY_DATABASE
@pytest.mark.parametrize("watched", [True, False], ids=["noticed by the watcher", "noticed by its own write"])
def test_lost_worker_closes_its_own_call(stage: Stage, watched: bool) -> None:
    answer = LateAnswer('{"cards": []}')
    if not watched:
        stage.engine.close()
    job_id = stage.new_cards(stage.asking(answer))
    delivery = stage.start(job_id)
    assert answer.begun.wait(10)
    newer = _take_over(stage, job_id)
    assert [call["state"] for call in stage.usage(job_id)] == ["lost"]
    if watched:
        assert delivery.wait() == "lost"
    before = stage.kit.row(job_id)
    answer.go.set()
    poll(lambda: not stage.active.all(), what="the code returned")
    assert delivery.wait() == "lost"
    (call,) = stage.usage(job_id)
    assert (call["state"], call["prompt_tokens"], call["billed"]) == ("failed", 100, "yes")
    assert stage.kit.row(job_id) == before, "without a lease, only usage is written"
    assert stage.kit.job(job_id).locked_by == newer.token


@pytest.mark.parametrize("watched", [True, False], ids=["noticed by the watcher", "noticed by its own write"])
def test_answer_after_a_takeover_creates_no_cards(
    stage: Stage, watched: bool, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    answer = LateAnswer(json.dumps(CARDS))
    if not watched:
        stage.engine.close()
    job_id = stage.new_cards(stage.asking(answer))
    delivery = stage.start(job_id)
    assert answer.begun.wait(10)
    newer = _take_over(stage, job_id)
    if watched:
        assert delivery.wait() == "lost"
    before = stage.kit.row(job_id)
    answer.go.set()
    assert delivery.wait() == "lost"
    poll(lambda: not stage.active.all(), what="the code returned")
    assert stage.kit.row(job_id) == before
    assert (stage.kit.rows("flashcards"), stage.kit.rows("ai_job_artifacts")) == ([], [])
    assert stage.kit.types(job_id) == ["created", "locked", "provider_called", "lease_lost", "locked"]
    (call,) = stage.usage(job_id)
    assert (call["state"], call["error_code"], call["billed"]) == ("failed", LOST, "yes")
    assert (call["prompt_tokens"], call["completion_tokens"]) == (100, 50), "the cost is recorded"
    lines = [line for line in log_lines() if line["event"] == "job.lock_lost"]
    assert [(line["jobId"], line["attemptNo"]) for line in lines] == [(job_id, 1)]
    assert stage.kit.lifecycle.mark_succeeded(newer).attempt_no == 2, "the newer worker holds the job"


def test_lost_lease_is_logged_once_if_the_watcher_checks_before_the_code_returns(
    sqlite_stage: Stage, log_lines: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = sqlite_stage
    stage.engine.close()  # This test runs the watcher's checks itself.

    def answer(request: Any, token: Any) -> str:
        _take_over(stage, job_id)
        remove = stage.active.remove

        def check_and_remove(run: Run) -> None:
            check = threading.Thread(target=stage.watcher.check)
            check.start()
            check.join()
            remove(run)

        monkeypatch.setattr(stage.active, "remove", check_and_remove)
        return json.dumps(CARDS)

    job_id = stage.new_cards(stage.asking(answer))
    assert stage.run(job_id) == "lost"
    poll(lambda: not stage.active.all(), what="the code returned")
    assert len([line for line in log_lines() if line["event"] == "job.lock_lost"]) == 1


@ANY_DATABASE
def test_cost_of_a_call_is_recorded_if_the_watcher_ends_the_attempt_first(stage: Stage) -> None:
    """The watcher finds the lease gone and closes the call; the answer arrives a moment later."""
    stage.engine.close()

    def answer(request: Any, token: Any) -> str:
        _take_over(stage, job_id)
        (run,) = stage.active.all()
        stage.watcher.stop(run, TIMEOUT)
        assert [call["state"] for call in stage.usage(job_id)] == ["failed"]
        return json.dumps(CARDS)

    job_id = stage.new_cards(stage.asking(answer))
    stage.run(job_id)
    poll(lambda: not stage.active.all(), what="the code returned")
    (call,) = stage.usage(job_id)
    assert (call["state"], call["prompt_tokens"], call["billed"]) == ("failed", 100, "yes")


@ANY_DATABASE
def test_own_end_is_not_mistaken_for_a_lost_lease(stage: Stage, log_lines: Any) -> None:
    """After the commit the row has no holder; a moment later the run is marked as ended."""
    stage.engine.close()
    for event_type in ("ai.job.completed", "ai.job.failed", "ai.job.cancelled"):

        def check(_event: Any) -> None:
            watcher = threading.Thread(target=stage.watcher.check)
            watcher.start()
            watcher.join(10)
            assert not watcher.is_alive()

        stage.kit.services.bus.subscribe(event_type, check)
    assert stage.run(stage.kit.new_job().id) == "succeeded"
    assert stage.run(stage.kit.new_job({"raise": "CONTENT_SAFETY_BLOCKED"}).id) == "failed"
    assert [line for line in log_lines() if line["event"] == "job.lock_lost"] == []


# --- shutdown ------------------------------------------------------------------------------------------------------


@ANY_DATABASE
def test_drain_lets_an_attempt_end_within_the_grace_time(stage: Stage) -> None:
    job_id = stage.kit.new_job(job_type=stage.scripted(sleeping(0.3))).id
    delivery = stage.start(job_id)
    poll(lambda: stage.kit.job(job_id).locked_by, what="the job was taken")
    assert stage.engine.drain(20) == 0
    assert delivery.wait() == "succeeded"
    assert stage.run(stage.kit.new_job().id) == "put_back", "a draining worker takes no job, and loses no message"


def test_drain_releases_a_running_job_and_another_worker_locks_it_at_once(stage: Stage) -> None:
    script = Held()
    job_id = stage.kit.new_job(job_type=stage.scripted(script)).id
    delivery = stage.start(job_id)
    assert script.begun.wait(10)
    assert stage.engine.drain(0.1) == 1
    assert delivery.wait() == "released"
    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.lost_count, job.retry_count, job.locked_by) == ("running", 0, 0, None)
    asked = stage.kit.events(job_id, "ai.job.enqueue")[-1]
    assert (asked.status, asked.available_at) == ("pending", stage.kit.services.clock.at)  # type: ignore[attr-defined]
    newer = stage.kit.lock(job_id, "worker-2")
    assert newer.attempt_no == 2
    script.go.set()
    poll(lambda: not stage.active.all(), what="the code returned")
    assert stage.kit.job(job_id).locked_by == newer.token
    assert stage.kit.types(job_id) == ["created", "locked", "released", "locked"]


@ANY_DATABASE
def test_drain_ends_a_cancelled_attempt_as_cancelled(stage: Stage) -> None:
    stage.engine.close()
    script = Held()
    job_id = stage.kit.new_job(job_type=stage.scripted(script)).id
    delivery = stage.start(job_id)
    assert script.begun.wait(10)
    stage.kit.lifecycle.request_cancel(job_id, "user:u1")
    stage.engine.drain(0)
    delivery.wait()
    assert stage.kit.job(job_id).lifecycle_status == "cancelled"
    script.go.set()


@ANY_DATABASE
def test_code_that_stops_before_its_release_does_not_lose_the_lease(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = stage.kit.lifecycle.release

    def slowly(lease: Any) -> Any:
        time.sleep(0.3)
        return release(lease)

    monkeypatch.setattr(stage.kit.lifecycle, "release", slowly)
    job_id = stage.kit.new_job(job_type=stage.scripted(sleeping())).id
    delivery = stage.start(job_id)
    poll(lambda: stage.kit.job(job_id).locked_by, what="the job was taken")
    stage.engine.drain(0)
    assert delivery.wait() == "released"
    assert stage.kit.types(job_id) == ["created", "locked", "released"]


@ANY_DATABASE
def test_job_locked_during_the_start_of_a_drain_is_released(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    take = stage.engine._prepare.take
    ran: list[int] = []

    def late(message: Any, **options: Any) -> Any:
        run = take(message, **options)
        stage.engine.drain(0)
        return run

    monkeypatch.setattr(stage.engine._prepare, "take", late)
    job_type = stage.scripted(lambda *_: ran.append(1) or {"output": {}, "artifacts": 0})  # type: ignore[func-returns-value]
    job_id = stage.kit.new_job(job_type=job_type).id
    assert stage.run(job_id) == "released"
    assert ran == []
    assert stage.active.all() == []
    assert stage.kit.job(job_id).locked_by is None


@ANY_DATABASE
def test_call_of_a_released_attempt_is_closed_by_its_opener(stage: Stage) -> None:
    def answer(request: Any, token: Any) -> str:
        token.sleep(60)
        raise AssertionError("unreachable")

    job_id = stage.new_cards(stage.asking(answer))
    delivery = stage.start(job_id)
    poll(lambda: stage.provider.requests, what="the call left")
    stage.engine.drain(0)
    assert delivery.wait() == "released"
    poll(lambda: not stage.active.all(), what="the code returned")
    (call,) = stage.usage(job_id)
    assert (call["state"], call["error_code"]) == ("failed", RELEASED)


@ANY_DATABASE
def test_renewal_right_after_a_success_reports_no_lost_lease(
    stage: Stage, log_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.engine.close()
    monkeypatch.setattr(stage.watcher, "_heartbeat_s", 0.0)

    def check(_event: Any) -> None:
        watcher = threading.Thread(target=stage.watcher.check)
        watcher.start()
        watcher.join(10)

    stage.kit.services.bus.subscribe("ai.job.completed", check)
    assert stage.run(stage.kit.new_job().id) == "succeeded"
    assert [line for line in log_lines() if line["event"] in ("job.lock_lost", "watcher.database.away")] == []


# --- one watcher for all runs ----------------------------------------------------------------------------------------


@ANY_DATABASE
def test_run_that_another_thread_is_ending_does_not_delay_the_cancel_of_others(stage: Stage) -> None:
    slow, quick = (stage.kit.new_job({"sleep_ms": 600_000}).id for _ in range(2))
    deliveries = {job_id: stage.start(job_id) for job_id in (slow, quick)}
    poll(lambda: len(stage.active.all()) == 2, what="both run")
    (ending,) = [run for run in stage.active.all() if run.lease.job_id == slow]
    with ending.end_lock:
        for job_id in (slow, quick):
            stage.kit.lifecycle.request_cancel(job_id, "user:u1")
        assert deliveries[quick].wait(5) == "cancelled"
        assert not deliveries[slow].is_over
    assert deliveries[slow].wait() == "cancelled"


@ANY_DATABASE
@pytest.mark.parametrize("what", ["renewal", "cancel"])
def test_watcher_tries_each_write_once_per_check(stage: Stage, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tries at a locked row would cost the other runs of the process their leases."""
    stage.engine.close()
    script = Held()
    job_id = stage.kit.new_job(job_type=stage.scripted(script)).id
    delivery = stage.start(job_id)
    assert script.begun.wait(10)
    if what == "cancel":
        stage.kit.lifecycle.request_cancel(job_id, "user:u1")
    else:
        stage.watcher.check()
        monkeypatch.setattr(stage.watcher, "_heartbeat_s", 0.0)
    tries: list[int] = []

    def locked(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("UPDATE ai_jobs"):
            tries.append(1)
            raise OperationalError(statement, {}, Exception("database is locked"))

    stage.kit.advance(20)
    event.listen(stage.kit.database.engine, "before_cursor_execute", locked)
    try:
        with pytest.raises(OperationalError):
            stage.watcher.check()
    finally:
        event.remove(stage.kit.database.engine, "before_cursor_execute", locked)

    assert tries == [1]
    stage.watcher.check()
    if what == "cancel":
        assert delivery.wait() == "cancelled"
    else:
        job = stage.kit.job(job_id)
        assert job.lock_until is not None
        assert job.lock_until - stage.kit.services.clock.at == timedelta(seconds=60)  # type: ignore[attr-defined]
    script.go.set()
    delivery.wait()
