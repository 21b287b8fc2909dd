"""Attempts and retries: which errors are retried, when and how often, and late or repeated messages."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text, update

from aijobs.canonical import canonical_hash
from aijobs.errors import JobError
from aijobs.logs import JOB_KEYS
from aijobs.outbox.models import OutboxEvent, OutboxState
from tests.integration.engine.stage import CARDS, NOTES, Stage
from tests.support.databases import ANY_DATABASE
from tests.support.jobs import BACKGROUND_TYPE, race


def raising(*codes: str | Exception) -> Any:
    """Return a script whose attempts raise these errors in order, and then succeed."""

    def script(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
        if attempt_no <= len(codes):
            wrong = codes[attempt_no - 1]
            raise JobError(wrong) if isinstance(wrong, str) else wrong
        return {"output": {}, "artifacts": 1}

    return script


def test_job_succeeds_and_records_its_artifacts(stage: Stage) -> None:
    job = stage.kit.new_job({"output": {"said": "hello"}, "artifacts": 3})
    assert stage.run(job.id) == "succeeded"
    row = stage.kit.row(job.id)
    assert (row["lifecycle_status"], row["progress"], row["artifact_count"]) == ("succeeded", 100, 3)
    assert (row["locked_by"], row["next_attempt_at"], row["error_code"]) == (None, None, None)
    assert len(stage.kit.rows("ai_job_artifacts", job_id=job.id)) == 3
    assert stage.kit.types(job.id) == ["created", "locked", "succeeded"]
    assert [event.event_type for event in stage.kit.events(job.id)] == ["ai.job.enqueue", "ai.job.completed"]
    assert stage.usage(job.id) == []
    assert stage.presence.seen == [("started", job.id), ("finished", job.id)]


def test_scripted_job_saves_its_output_and_hash_with_the_success(
    stage: Stage, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    output = {"output": {"said": "hello"}, "artifacts": 1}
    job = stage.kit.new_job(output)
    with stage.kit.statements() as seen:
        assert stage.run(job.id) == "succeeded"
    row = stage.kit.row(job.id)
    assert (row["validated_output"], row["output_hash"]) == (output, canonical_hash(output))
    (line,) = [line for line in log_lines() if line["event"] == "job.succeeded"]
    assert line["outputHash"] == row["output_hash"]
    assert sum("output_hash=" in statement.replace(" = ", "=") for statement in seen) == 1, "written with the success"


def test_plain_job_runs_only_the_statements_it_needs(stage: Stage) -> None:
    """Each statement is a round trip, which costs a worker more time than the code around it."""
    job_id = stage.kit.new_job({"output": {"said": "hello"}, "artifacts": 1}).id
    with stage.kit.database.transaction() as session:
        session.execute(update(OutboxEvent).values(status=OutboxState.PUBLISHED))
    message = stage.message(job_id)
    stage.engine.close()  # The watcher runs statements too.
    with stage.kit.statements() as seen:
        assert stage.engine.execute(message) == "succeeded"
    first = re.compile(r"(UPDATE|INSERT INTO|SELECT .*?\bFROM) (\w+)", re.DOTALL)
    plain = [re.sub(r"\(SELECT.*?\)", "", statement, flags=re.DOTALL) for statement in seen]
    told = [(found[1].split()[0], found[2]) for statement in plain if (found := first.search(statement))]
    end = [("SELECT", "ai_jobs"), ("INSERT", "ai_job_artifacts"), ("UPDATE", "ai_jobs")]
    if stage.kit.database.joins_statements:  # A lock and an end are one statement each, in its first place an UPDATE.
        assert told == [("UPDATE", "ai_jobs"), *end]
    else:
        lock = [("INSERT", "ai_job_events"), ("UPDATE", "outbox_events"), ("SELECT", "ai_jobs")]
        rows = [("INSERT", "ai_job_events"), ("INSERT", "outbox_events")]
        assert told == [("UPDATE", "ai_jobs"), *lock, *end, *rows]


def test_unreadable_input_fails_the_job_after_one_retry(stage: Stage) -> None:
    """The attempt reads the input, not the lock: an error there would undo it, and the re-drive would repeat it."""
    job_id = stage.kit.new_job().id
    more_digits_than_an_int_may_have = "9" * 5000
    with stage.kit.database.transaction() as session:
        session.execute(text(f"UPDATE ai_job_snapshots SET content = '[{more_digits_than_an_int_may_have}]'"))
    job = stage.run_to_end(job_id)
    assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_ERROR")
    assert stage.kit.types(job_id) == ["created", "locked", "retry_scheduled", "locked", "failed"]


def test_wait_doubles_with_each_retry_until_retries_are_used_up(stage: Stage) -> None:
    job_type = stage.scripted(raising(*["PROVIDER_UNAVAILABLE"] * 9), max_retries=3, delay=1000)
    job_id = stage.kit.new_job(job_type=job_type).id
    waits = []
    for _ in range(3):
        failed_at = stage.kit.services.clock.at  # type: ignore[attr-defined]
        stage.run(job_id)
        job = stage.kit.job(job_id)
        assert (job.lifecycle_status, job.locked_by) == ("running", None)
        assert job.next_attempt_at is not None
        waits.append(job.next_attempt_at - failed_at)
        asked = stage.kit.events(job_id, "ai.job.enqueue")[-1]
        assert (asked.status, asked.available_at) == ("pending", job.next_attempt_at), "the wait is in the outbox"
        stage.kit.clock.at = job.next_attempt_at  # type: ignore[attr-defined]
    assert waits == [timedelta(seconds=s) for s in (1, 2, 4)]
    assert stage.run(job_id) == "failed"
    job = stage.kit.job(job_id)
    assert (job.error_code, job.retry_count, job.lost_count, job.attempt_no) == ("PROVIDER_UNAVAILABLE", 3, 0, 4)
    assert stage.kit.types(job_id).count("retry_scheduled") == 3
    assert stage.kit.types(job_id)[-2:] == ["locked", "failed"]
    assert len(stage.kit.events(job_id, "ai.job.failed")) == 1


@pytest.mark.parametrize(
    ("codes", "attempts"),
    [
        (["INTERNAL_ERROR", "INTERNAL_PROJECTION"], 2),
        (["INTERNAL_OF_A_PLUG_IN", "PROVIDER_UNAVAILABLE", "INTERNAL_DATABASE"], 3),
        (["INTERNAL_ERROR", "PROVIDER_CONNECTION_LOST", "PROVIDER_EMPTY_OUTPUT", "PROVIDER_CONNECTION_LOST"], 4),
    ],
    ids=["two internal", "with another between", "each other code once"],
)
@ANY_DATABASE
def test_internal_codes_share_one_retry_and_other_once_codes_have_one_each(
    stage: Stage, codes: list[str], attempts: int
) -> None:
    job = stage.run_to_end(stage.kit.new_job(job_type=stage.scripted(raising(*codes), max_retries=9)).id)
    assert (job.lifecycle_status, job.error_code, job.attempt_no) == ("failed", codes[-1], attempts)


@ANY_DATABASE
def test_code_with_one_retry_has_none_if_max_retries_is_zero(stage: Stage) -> None:
    job_type = stage.scripted(raising("INTERNAL_ERROR"), max_retries=0)
    job = stage.run_to_end(stage.kit.new_job(job_type=job_type).id)
    assert (job.lifecycle_status, job.attempt_no) == ("failed", 1)


@pytest.mark.parametrize(
    "code", ["CONTENT_SAFETY_BLOCKED", "CREDENTIAL_INVALID", "INTERNAL_CONFIG", "VALIDATION_NOTHING_TO_EXTRACT"]
)
def test_permanent_error_fails_at_once_with_a_public_message(sqlite_stage: Stage, code: str) -> None:
    job_type = sqlite_stage.scripted(raising(code), max_retries=5)
    job = sqlite_stage.run_to_end(sqlite_stage.kit.new_job(job_type=job_type).id)
    assert (job.lifecycle_status, job.error_code, job.attempt_no) == ("failed", code, 1)
    assert job.public_error_message
    assert "Traceback" not in job.public_error_message


@ANY_DATABASE
def test_retry_waits_as_long_as_the_provider_asks(stage: Stage) -> None:
    wish = JobError("PROVIDER_RATE_LIMITED", retry_after=timedelta(seconds=90))
    job_type = stage.scripted(raising(wish), delay=1000)
    job_id = stage.kit.new_job(job_type=job_type).id
    stage.run(job_id)
    job = stage.kit.job(job_id)
    assert job.next_attempt_at == stage.kit.services.clock.at + timedelta(seconds=90)  # type: ignore[attr-defined]
    stage.kit.advance(89.9)
    assert stage.run(job_id) == "not_taken", "a message that comes early changes nothing"
    stage.kit.advance(0.1)
    assert stage.run(job_id) == "succeeded"


def test_retries_and_losses_are_counted_separately(stage: Stage) -> None:
    job_type = stage.scripted(raising("PROVIDER_UNAVAILABLE", "PROVIDER_UNAVAILABLE"), max_retries=2)
    job_id = stage.kit.new_job(job_type=job_type).id
    lease = stage.kit.lock(job_id)
    stage.kit.advance(91)
    (lost,) = stage.kit.lifecycle.find_expired_locks()
    assert lost.lock_until is not None
    stage.kit.lifecycle.expire(lease, lost.lock_until)
    stage.kit.advance(2)
    job = stage.run_to_end(job_id)
    assert (job.lifecycle_status, job.retry_count, job.uncharged_losses) == ("succeeded", 1, 1)


@pytest.mark.parametrize(
    "error",
    [ValueError("plain"), KeyError("odd"), SystemExit(3), KeyboardInterrupt(), RecursionError(), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_of_a_script_ends_the_job_and_not_the_worker(sqlite_stage: Stage, error: BaseException) -> None:
    def script(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
        raise error

    job_type = sqlite_stage.scripted(script)
    job = sqlite_stage.run_to_end(sqlite_stage.kit.new_job(job_type=job_type).id)
    assert (job.lifecycle_status, job.error_code, job.attempt_no) == ("failed", "INTERNAL_ERROR", 2)


@pytest.mark.parametrize("code", ["CANCELLED", "LOCK_LOST", "RELEASED"])
def test_engine_code_raised_by_a_script_fails_the_job(sqlite_stage: Stage, code: str) -> None:
    """A script or a provider may raise such a code although nothing was cancelled, taken over or released."""
    job_id = sqlite_stage.kit.new_job({"raise": code}).id
    sqlite_stage.run(job_id)
    job = sqlite_stage.kit.job(job_id)
    assert job.locked_by is None, "the attempt has ended, so no worker holds the job"
    job = sqlite_stage.run_to_end(job_id) if job.lifecycle_status == "running" else job
    assert (job.lifecycle_status, job.error_code) == ("failed", code)


@pytest.mark.parametrize("answer", [None, [], "text", {"output": {}, "artifacts": "many"}, {1: 2}, {}], ids=repr)
def test_invalid_script_output_fails_the_job(sqlite_stage: Stage, answer: Any) -> None:
    job_type = sqlite_stage.scripted(lambda *_: answer)
    job = sqlite_stage.run_to_end(sqlite_stage.kit.new_job(job_type=job_type).id)
    assert job.lifecycle_status == "failed"
    assert job.error_code in ("INTERNAL_ERROR", "VALIDATION_OUTPUT_SCHEMA")


# --- repeated and late messages ------------------------------------------------------------------------------------


def test_five_messages_for_one_job_cause_one_run(stage: Stage) -> None:
    runs: list[int] = []
    guard = threading.Lock()

    def script(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
        with guard:
            runs.append(attempt_no)
        context.sleep(0.1)
        return {"output": {}, "artifacts": 1}

    job_id = stage.kit.new_job(job_type=stage.scripted(script)).id
    outcomes = race(*[lambda: stage.run(job_id)] * 5)
    assert sorted(outcomes) == ["not_taken"] * 4 + ["succeeded"]
    assert runs == [1]
    assert stage.kit.types(job_id) == ["created", "locked", "succeeded"]


def test_messages_of_two_users_with_one_key_and_of_a_retry_run_three_separate_jobs(
    stage: Stage,
) -> None:
    kit = stage.kit
    job_type = stage.asking(JobError("CONTENT_SAFETY_BLOCKED", "no"), CARDS)
    parent, other = (
        kit.new_job(job_type=job_type, input=NOTES, idempotency_key="k1", user_id=user).id for user in ("u1", "u2")
    )
    assert stage.run(parent) == "failed"
    child = kit.jobs.retry(parent, "operator:ann").job.id
    assert kit.broker.pending_count("ai-background") == 3, "the parent's message is still there"
    messages = [kit.broker.take("ai-background") for _ in range(3)]
    assert {message.job_id for message in messages} == {parent, other, child}
    assert len({message.idempotency_key for message in messages}) == 3

    outcomes = [(message.job_id, stage.engine.execute(message)) for message in messages * 2]

    assert [job_id for job_id, outcome in outcomes if outcome != "not_taken"] == [
        message.job_id for message in messages if message.job_id != parent
    ]
    assert len(stage.provider.requests) == 3
    for job_id, user, status in ((parent, "u1", "failed"), (other, "u2", "succeeded"), (child, "u1", "succeeded")):
        job = kit.job(job_id)
        assert (job.lifecycle_status, job.user_id, job.attempt_no) == (status, user, 1)
        assert kit.types(job_id).count("locked") == len(stage.usage(job_id)) == 1
        cards = kit.rows("flashcards", job_id=job_id)
        assert [card["user_id"] for card in cards] == ([user] * 2 if status == "succeeded" else [])


@pytest.mark.parametrize("state", ["running", "succeeded", "failed", "cancelled", "cancelled_waiting"])
@ANY_DATABASE
def test_late_message_changes_nothing(stage: Stage, state: str) -> None:
    job_id, _ = stage.kit.job_in(state)
    before = stage.kit.everything()
    assert stage.run(job_id) == "not_taken"
    assert stage.kit.everything() == before


@ANY_DATABASE
def test_message_of_an_unknown_job_changes_nothing(stage: Stage) -> None:
    job = stage.kit.new_job()
    message = stage.message(job.id)
    before = stage.kit.everything()
    assert stage.engine.execute(type(message)("no-such-job", "synthetic", "0" * 64, message.created_at)) == "not_taken"
    assert stage.kit.everything() == before


@ANY_DATABASE
def test_message_of_a_paused_queue_is_dropped(stage: Stage) -> None:
    job = stage.kit.new_job()
    stage.kit.pause()
    assert stage.run(job.id) == "not_taken"
    assert stage.kit.job(job.id).lifecycle_status == "queued"
    background = stage.kit.new_job(job_type=BACKGROUND_TYPE)
    assert stage.run(background.id) == "succeeded"


# --- unknown job types ---------------------------------------------------------------------------------------------


def _forget(stage: Stage, job_type: str) -> None:
    del stage.kit.services.registry._definitions[job_type]


def _redriven(stage: Stage, job_id: str, redrives: int) -> None:
    event = stage.kit.events(job_id)[0]
    with stage.kit.database.transaction() as session:
        stored = session.get_one(type(event), event.id)
        stored.redrives, stored.status = redrives, "published"


@ANY_DATABASE
def test_worker_does_not_lock_a_job_of_an_unknown_type(stage: Stage, log_lines: Any) -> None:
    job_id = stage.kit.new_job(job_type=BACKGROUND_TYPE).id
    _forget(stage, BACKGROUND_TYPE)
    before = stage.kit.everything()
    for _ in range(5):
        assert stage.run(job_id) == "not_taken"
    assert stage.kit.everything() == before
    warnings = [line for line in log_lines() if line["level"] == "warning"]
    assert [line["event"] for line in warnings] == ["job.type_unknown"], "one warning a minute"
    assert (warnings[0]["jobType"], warnings[0]["jobId"]) == (BACKGROUND_TYPE, job_id)
    assert set(JOB_KEYS) <= set(warnings[0])


@pytest.mark.parametrize(("seconds", "redrives"), [(3599, 9), (7200, 2)])
@ANY_DATABASE
def test_job_of_an_unknown_type_stays_queued_for_an_hour_and_three_redrives(
    stage: Stage, seconds: int, redrives: int
) -> None:
    job_id = stage.kit.new_job(job_type=BACKGROUND_TYPE).id
    _forget(stage, BACKGROUND_TYPE)
    _redriven(stage, job_id, redrives)
    stage.kit.advance(seconds)
    assert stage.run(job_id) == "not_taken"
    assert stage.kit.job(job_id).lifecycle_status == "queued"


def test_job_of_an_unknown_type_fails_after_an_hour_and_three_redrives(stage: Stage) -> None:
    job_id = stage.kit.new_job(job_type=BACKGROUND_TYPE).id
    _forget(stage, BACKGROUND_TYPE)
    _redriven(stage, job_id, 3)
    stage.kit.advance(3601)
    assert stage.run(job_id) == "not_taken"
    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_UNKNOWN_JOB_TYPE")
    assert stage.kit.types(job_id) == ["created", "locked", "failed"]
    writers = [(row.actor, row.instance) for row in stage.kit.history(job_id)[1:]]
    assert writers == [("worker", "host~boot~1~1~1~stage")] * 2, "the worker that failed the job wrote both rows"
    assert len(stage.kit.events(job_id, "ai.job.failed")) == 1


@pytest.mark.parametrize("code", ["PROVIDER_" + "X" * 60, "not a code", "", "É" * 64, "A\x00B"])
def test_invalid_error_code_is_recorded_as_internal_error(stage: Stage, code: str) -> None:
    """Otherwise the end couldn't be written, and the next attempt would pay the provider again."""
    job_id = stage.new_cards(stage.asking(JobError(code, "of a plug-in's own making"), max_retries=0))
    assert stage.run(job_id) == "failed"
    job = stage.kit.job(job_id)
    assert (job.error_code, job.attempt_no, job.lost_count) == ("INTERNAL_ERROR", 1, 0)
    assert "of a plug-in's own making" in stage.kit.row(job_id)["internal_error_message"]
    assert [row["error_code"] for row in stage.usage(job_id)] == ["INTERNAL_ERROR"]


def test_answer_faults_with_unstorable_text_are_cleaned_and_kept(stage: Stage) -> None:
    faults = ["lone \ud800", "nul \x00", "x" * 100_000, 5, "fine"]
    error = JobError("VALIDATION_OUTPUT_SEMANTICS", "odd", faults=faults)  # type: ignore[arg-type]
    job_id = stage.new_cards(stage.asking(error, CARDS))
    stage.run(job_id)
    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.retry_count, job.locked_by) == ("running", 1, None)
    assert job.answer_faults[3:] == ["5", "fine"]
    assert stage.run_to_end(job_id).lifecycle_status == "succeeded"


@ANY_DATABASE
def test_attempt_with_a_retry_returns_retry_scheduled(stage: Stage) -> None:
    job_id = stage.kit.new_job({"raise": "PROVIDER_UNAVAILABLE"}).id
    assert stage.run(job_id) == "retry_scheduled"
    assert stage.kit.job(job_id).lifecycle_status == "running"
