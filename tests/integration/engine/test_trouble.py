"""Failures while an attempt ends, and the texts that are recorded of errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from aijobs.engine.end_writes import EndWrites
from aijobs.engine.failure import MAX_BYTES
from aijobs.engine.outcome import Outcome
from aijobs.engine.run import Run
from aijobs.errors import JobError
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput
from aijobs.jobs.status import FINAL
from aijobs.logs import JOB_KEYS
from aijobs.queues.message import PUT_BACK
from aijobs.upkeep.reaper import LockReaper
from tests.integration.engine.stage import CARDS, NOTES, Stage, Writing, card_row, saved_job
from tests.support.databases import ANY_DATABASE, OTHERS_LATER, SERVERS
from tests.support.polling import poll

CANARY = "canary-8f3a"


class Faults:
    """Database errors once armed: at the `number`-th statement, and, if `lasting`, at all later ones."""

    def __init__(self, number: int, *, lasting: bool) -> None:
        self.number, self.lasting = number, lasting
        self.armed, self.seen = False, 0

    def __call__(self, _conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if not self.armed:
            return
        self.seen += 1
        if self.seen == self.number or (self.lasting and self.seen > self.number):
            raise OperationalError(statement, {}, Exception("disk I/O error"))

    @property
    def struck(self) -> bool:
        return self.seen >= self.number


@contextmanager
def at_work(stage: Stage, faults: Faults) -> Iterator[None]:
    event.listen(stage.kit.database.engine, "before_cursor_execute", faults)
    try:
        yield
    finally:
        faults.armed = False
        event.remove(stage.kit.database.engine, "before_cursor_execute", faults)


def helped_to_its_end(stage: Stage, job_id: str) -> AiJob:
    """Run passes and attempts until the job has ended; return the job."""
    for _ in range(5):
        job = stage.kit.job(job_id)
        if job.lifecycle_status in FINAL:
            return job
        if job.locked_by is None:
            return stage.run_to_end(job_id)
        stage.kit.advance(91)
        LockReaper(stage.kit.database, stage.kit.lifecycle).reap()
    raise AssertionError("the job did not end")


@OTHERS_LATER
@pytest.mark.parametrize(
    "lasting",
    [
        pytest.param(False, id="one statement"),
        # Long, because for each statement the answer waits for the database until the deadline of its attempt.
        pytest.param(True, id="all from one on", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("ends", ["well", "in a failure", "in a retry"])
def test_failure_of_any_statement_after_the_call_leaves_no_job_open(stage: Stage, ends: str, lasting: bool) -> None:
    stage.engine.close()  # Otherwise the watcher's statements would be counted too.
    outcomes: dict[str, Any] = {
        "well": CARDS,
        "in a failure": JobError("CONTENT_SAFETY_BLOCKED"),
        "in a retry": JobError("PROVIDER_UNAVAILABLE"),
    }
    for number in range(1, 80):
        faults = Faults(number, lasting=lasting)

        def answer(request: Any, token: Any, faults: Faults = faults) -> str:
            faults.armed = True
            if isinstance(outcomes[ends], Exception):
                raise outcomes[ends]
            return json.dumps(outcomes[ends])

        # The attempt keeps an answer until its deadline and waits for the database.
        job_id = stage.new_cards(stage.asking(answer, CARDS, timeout_ms=1000 if lasting else 60_000))
        stage.provider.requests.clear()
        with at_work(stage, faults):
            stage.run(job_id)
            poll(lambda: not stage.active.all(), what="the code returned")
        saved = stage.kit.job(job_id).output_hash is not None
        job = helped_to_its_end(stage, job_id)
        assert job.lifecycle_status in FINAL
        assert len(stage.provider.requests) == len(stage.usage(job_id)) == (1 if saved else job.attempt_no)
        assert {call["state"] for call in stage.usage(job_id)} <= {"done", "failed", "lost"}
        assert stage.kit.types(job_id)[-1] == job.lifecycle_status
        assert job.artifact_count == len(stage.kit.rows("ai_job_artifacts", job_id=job_id))
        if not faults.struck:
            assert number > 5
            return
    raise AssertionError("the statements never ended")


@ANY_DATABASE
def test_answer_that_arrives_during_a_database_outage_is_saved_afterwards(stage: Stage) -> None:
    faults = Faults(1, lasting=True)
    back = threading.Timer(1.2, lambda: setattr(faults, "armed", False))

    def answer(request: Any, token: Any) -> str:
        faults.armed = True
        back.start()
        return json.dumps(CARDS)

    job_id = stage.new_cards(stage.asking(answer))
    with at_work(stage, faults):
        stage.run(job_id)
    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.attempt_no, job.retry_count) == ("succeeded", 1, 0)
    assert len(stage.provider.requests) == 1
    assert [call["state"] for call in stage.usage(job_id)] == ["done"]


@ANY_DATABASE
def test_answer_waits_for_the_database_until_the_deadline_of_its_attempt(stage: Stage) -> None:
    faults = Faults(1, lasting=True)

    def answer(request: Any, token: Any) -> str:
        faults.armed = True
        return json.dumps(CARDS)

    job_id = stage.new_cards(stage.asking(answer, CARDS, timeout_ms=1000))
    with at_work(stage, faults):
        stage.run(job_id)
        poll(lambda: not stage.active.all(), what="the code returned")
    assert stage.kit.job(job_id).output_hash is None
    assert helped_to_its_end(stage, job_id).lifecycle_status == "succeeded"


@ANY_DATABASE
def test_answer_saved_by_an_unconfirmed_commit_is_projected_in_the_same_attempt(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to COMMIT is lost in an outage, so the COMMIT can be confirmed only afterwards."""
    transact, lost = stage.kit.database.transact, list[str]()

    def writing(work: Any, confirm: Any = None, **options: Any) -> Any:
        done = transact(work, confirm, **options)
        if getattr(confirm, "__qualname__", "").startswith("saved.") and not lost:
            lost.append("the answer")
            raise OperationalError("COMMIT", {}, Exception("server closed the connection"))
        return done

    monkeypatch.setattr(stage.kit.database, "transact", writing)
    job_id = stage.new_cards(stage.asking(CARDS))
    stage.run(job_id)
    assert lost
    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.attempt_no, job.lost_count) == ("succeeded", 1, 0)
    assert stage.kit.types(job_id).count("output_saved") == 1


@SERVERS
def test_connection_cut_while_reading_the_input_costs_no_retry(stage: Stage) -> None:
    cut: list[int] = []

    def cutting(connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "FROM ai_job_snapshots" in statement and not cut:
            cut.append(1)
            connection.connection.driver_connection.close()

    job_id = stage.new_cards(stage.asking(CARDS))
    event.listen(stage.kit.database.engine, "before_cursor_execute", cutting)
    try:
        stage.run(job_id)
    finally:
        event.remove(stage.kit.database.engine, "before_cursor_execute", cutting)
    job = stage.kit.job(job_id)
    assert cut
    assert (job.lifecycle_status, job.attempt_no, job.retry_count) == ("succeeded", 1, 0)


@ANY_DATABASE
def test_cancel_that_cannot_be_written_is_completed_later(stage: Stage) -> None:
    stage.engine.close()
    faults = Faults(2, lasting=True)

    def answer(request: Any, token: Any) -> str:
        stage.kit.lifecycle.request_cancel(job_id, "user:u1")
        faults.armed = True
        return json.dumps(CARDS)

    job_id = stage.new_cards(stage.asking(answer, timeout_ms=1000))
    with at_work(stage, faults):
        assert stage.run(job_id) == "lost"
        poll(lambda: not stage.active.all(), what="the code returned")
    assert helped_to_its_end(stage, job_id).lifecycle_status == "cancelled"


@ANY_DATABASE
def test_cancel_that_the_attempt_cannot_write_is_left_to_the_reaper(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    stage.engine.close()
    ids: list[str] = []

    def script(*_: Any) -> dict[str, Any]:
        stage.kit.lifecycle.request_cancel(ids[0], "user:u1")
        return {"output": {}, "artifacts": 1}

    def fails(*_: Any, **__: Any) -> Any:
        raise OperationalError("UPDATE", {}, Exception("disk I/O error"))

    monkeypatch.setattr(EndWrites, "cancel", fails)
    ids.append(stage.kit.new_job(job_type=stage.scripted(script)).id)
    assert stage.run(ids[0]) == "lost"
    poll(lambda: not stage.active.all(), what="the code returned")
    assert [line["event"] for line in log_lines() if line["level"] == "error"] == ["job.left_to_reaper"]
    assert helped_to_its_end(stage, ids[0]).lifecycle_status == "cancelled"


@ANY_DATABASE
def test_message_that_arrives_during_a_database_outage_is_put_back(stage: Stage) -> None:
    stage.engine.close()
    job_id = stage.kit.new_job().id
    message = stage.message(job_id)
    faults = Faults(1, lasting=True)
    with at_work(stage, faults):
        faults.armed = True
        assert stage.engine.execute(message) == PUT_BACK
    assert stage.run(job_id) == "succeeded"


@ANY_DATABASE
def test_database_error_after_the_lock_leaves_no_job_held_for_ever(stage: Stage) -> None:
    stage.engine.close()
    for number in range(1, 30):
        job_id = stage.kit.new_job().id
        message = stage.message(job_id)
        faults = Faults(number, lasting=False)
        with at_work(stage, faults):
            faults.armed = True
            stage.engine.execute(message)
            poll(lambda: not stage.active.all(), what="the code returned")
        assert helped_to_its_end(stage, job_id).lifecycle_status == "succeeded"
        if not faults.struck:
            return
    raise AssertionError("the statements never ended")


@ANY_DATABASE
def test_run_that_cannot_be_ended_does_not_delay_the_cancel_of_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (stage.kit.new_job({"sleep_ms": 600_000}).id for _ in range(2))
    cancel = EndWrites.cancel

    def fails(writes: EndWrites, run: Run, **how: Any) -> Any:
        if run.lease.job_id == bad:
            raise OperationalError("UPDATE", {}, Exception("disk I/O error"))
        return cancel(writes, run, **how)

    monkeypatch.setattr(EndWrites, "cancel", fails)
    deliveries = [stage.start(bad), stage.start(good)]
    poll(lambda: stage.kit.job(bad).locked_by and stage.kit.job(good).locked_by)
    for job_id in (bad, good):
        stage.kit.lifecycle.request_cancel(job_id, "user:u1")
    assert deliveries[1].wait() == "cancelled"
    deliveries[0].wait()
    assert helped_to_its_end(stage, bad).lifecycle_status == "cancelled"


# --- texts of errors -------------------------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 20_000_000),
        ValueError("a\x00b" * 9000),
        ValueError("\ud800" * 9000),
        ValueError("\N{GRINNING FACE}" * 9000),
        Unprintable(),
        JobError("PROVIDER_ACCOUNT_EXHAUSTED", "\x00\udfff\N{GRINNING FACE}" * 9000),
    ],
    ids=["20 MB", "nul", "surrogates", "emoji", "unprintable", "coded"],
)
def test_any_error_text_can_be_recorded(stage: Stage, error: Exception) -> None:
    def script(*_: Any) -> dict[str, Any]:
        raise error

    job = stage.run_to_end(stage.kit.new_job(job_type=stage.scripted(script)).id)
    assert job.lifecycle_status == "failed"
    text = stage.kit.row(job.id)["internal_error_message"]
    assert 0 < len(text.encode()) <= MAX_BYTES
    assert stage.run(stage.kit.new_job().id) == "succeeded", "the worker still works"


@ANY_DATABASE
def test_internal_message_has_a_stack_without_secrets_and_public_message_has_neither(stage: Stage) -> None:
    def script(*_: Any) -> dict[str, Any]:
        raise ValueError("calling https://me:hunter2pass@host/v1 with sk-abcdefghijklmnop failed")

    job = stage.run_to_end(stage.kit.new_job(job_type=stage.scripted(script)).id)
    text = stage.kit.row(job.id)["internal_error_message"]
    assert 'File "' in text
    assert "ValueError: calling" in text
    for secret in ("hunter2pass", "abcdefghijklmnop"):
        assert secret not in text
    assert job.public_error_message is not None
    assert all(part not in job.public_error_message for part in ("https", "File", "ValueError"))


# --- lines -----------------------------------------------------------------------------------------------------------


def _about(lines: list[dict[str, Any]], job_id: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("jobId") == job_id]


@ANY_DATABASE
def test_each_log_line_of_a_job_has_the_eight_keys(stage: Stage, log_lines: Callable[[], list[dict[str, Any]]]) -> None:
    well = stage.new_cards(stage.asking(CARDS))
    stage.run(well)
    ill = stage.kit.new_job({"raise": "PROVIDER_UNAVAILABLE"}).id
    stage.run_to_end(ill)
    lost = stage.kit.running().job_id
    stage.kit.advance(91)
    LockReaper(stage.kit.database, stage.kit.lifecycle).reap()
    for job_id in (well, ill, lost):
        lines = _about(log_lines(), job_id)
        assert lines
        for line in lines:
            assert set(JOB_KEYS) <= set(line), line
    (end,) = [line for line in _about(log_lines(), well) if line["event"] == "job.succeeded"]
    (enqueue,) = stage.kit.events(well, "ai.job.enqueue")
    assert (end["jobType"], end["queueName"], end["outboxId"], end["attemptNo"], end["lifecycleStatus"]) == (
        stage.kit.job(well).job_type,
        "ai-background",
        enqueue.id,
        1,
        "succeeded",
    )
    assert end["errorCode"] is None
    assert isinstance(end["durationMs"], int)
    (end,) = [line for line in _about(log_lines(), ill) if line["event"] == "job.failed"]
    assert (end["errorCode"], end["lifecycleStatus"], end["attemptNo"]) == ("PROVIDER_UNAVAILABLE", "failed", 3)
    assert end["outboxId"] == stage.kit.events(ill, "ai.job.enqueue")[-1].id


@ANY_DATABASE
def test_log_lines_contain_no_input_output_or_error_text(
    stage: Stage, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    answer = json.loads(json.dumps(CARDS).replace("What is osmosis?", f"What is {CANARY}?"))
    notes = {**NOTES, "source": {"id": "note-1", "title": CANARY}}
    attempts = [f"{CANARY} is not JSON", {"cards": [{"card_type": CANARY}]}, answer]
    job_type = stage.asking(*attempts)
    job_id = stage.kit.jobs.create_job(CreateJobInput("u1", job_type, "note", "note-1", notes)).job.id
    stage.run_to_end(job_id)

    def script(*_: Any) -> dict[str, Any]:
        raise ValueError(CANARY * 30_000)

    failed = stage.kit.new_job({"output": {"said": CANARY}}, job_type=stage.scripted(script)).id
    stage.run_to_end(failed)
    lines = [json.dumps(line) for line in log_lines()]
    assert lines
    assert not [line for line in lines if CANARY in line]
    assert CANARY in stage.kit.row(failed)["internal_error_message"], "the text is for operators only"
    for wanted in (job_id, failed):
        own = [line for line in lines if wanted in line]
        assert sum(map(len, own)) / stage.kit.job(wanted).attempt_no < 4096, "an attempt's lines are short"


def test_value_too_long_for_its_column_is_retried_once_and_not_logged(
    stage: Stage, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    def project(session: Any, job: Any) -> None:
        card = card_row(job.id, 0)
        card.source_title, card.lang = CANARY * 30_000, None  # type: ignore[assignment]
        session.add(card)

    job = stage.run_to_end(saved_job(stage, Writing(project)))
    assert (job.error_code, job.retry_count) == ("INTERNAL_PROJECTION", 1)
    lines = [json.dumps(line) for line in log_lines()]
    assert not [line for line in lines if CANARY in line]
    assert CANARY not in stage.kit.row(job.id)["internal_error_message"]


@ANY_DATABASE
def test_internal_error_is_not_logged_as_a_database_outage(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """Otherwise the person on call would search for the fault in the database."""

    def fault(*_: Any, **_options: Any) -> Any:
        raise TypeError(CANARY)

    message = stage.message(stage.kit.new_job().id)
    monkeypatch.setattr(stage.engine._prepare, "take", fault)
    monkeypatch.setattr(stage.watcher, "check", fault)
    for _ in range(3):
        assert stage.engine.execute(message) == Outcome.NOT_TAKEN
    poll(lambda: len([line for line in log_lines() if line["level"] == "error"]) == 2, what="both have logged an error")
    errors = {line["event"]: line for line in log_lines() if line["level"] == "error"}
    assert set(errors) == {"engine.failed", "watcher.failed"}
    for line in errors.values():
        assert line["error"] == "TypeError"
        assert " fault" in line["where"][-1]
    assert not [line for line in log_lines() if "away" in line["event"] or CANARY in str(line)]
