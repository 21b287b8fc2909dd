"""From one attempt to the next: what is tried again, when, how often, and what a message finds that comes late."""

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
from tests.support.jobs import BACKGROUND_TYPE, race

ANY_DATABASE = pytest.mark.parametrize("database_server", ["sqlite"], indirect=True)
"""For what has nothing to do with the kind of database."""


def raising(*codes: str | Exception) -> Any:
    """A script whose attempts raise these in turn; after the last it answers."""

    def script(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
        if attempt_no <= len(codes):
            wrong = codes[attempt_no - 1]
            raise JobError(wrong) if isinstance(wrong, str) else wrong
        return {"output": {}, "artifacts": 1}

    return script


def test_a_job_runs_and_leaves_its_artifacts(stage: Stage) -> None:
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


def test_success_of_a_script_keeps_its_validated_output_and_the_hash(
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


def test_a_job_that_nothing_happens_to_costs_no_statement_more_than_it_needs(stage: Stage) -> None:
    """Each is a round trip, and a worker's time: the greater part of a job where the work itself is waiting."""
    job_id = stage.kit.new_job({"output": {"said": "hello"}, "artifacts": 1}).id
    with stage.kit.database.transaction() as session:
        session.execute(update(OutboxEvent).values(status=OutboxState.PUBLISHED))
    message = stage.message(job_id)
    stage.engine.close()  # The watcher asks too.
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


def test_an_input_that_cannot_be_read_fails_its_job_and_is_not_tried_for_ever(stage: Stage) -> None:
    """Read in the attempt: within the lock it would undo that, and the re-drive would send the job again and again."""
    job_id = stage.kit.new_job().id
    more_digits_than_an_int_may_have = "9" * 5000
    with stage.kit.database.transaction() as session:
        session.execute(text(f"UPDATE ai_job_snapshots SET content = '[{more_digits_than_an_int_may_have}]'"))
    job = stage.run_to_end(job_id)
    assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_ERROR")
    assert stage.kit.types(job_id) == ["created", "locked", "retry_scheduled", "locked", "failed"]


def test_a_passing_trouble_uses_up_the_retries_and_each_wait_doubles(stage: Stage) -> None:
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
    ids=["two of ours", "with another between", "others each for itself"],
)
@ANY_DATABASE
def test_internal_codes_share_one_retry_a_job_and_others_have_one_each(
    stage: Stage, codes: list[str], attempts: int
) -> None:
    job = stage.run_to_end(stage.kit.new_job(job_type=stage.scripted(raising(*codes), max_retries=9)).id)
    assert (job.lifecycle_status, job.error_code, job.attempt_no) == ("failed", codes[-1], attempts)


@ANY_DATABASE
def test_once_never_passes_max_retries(stage: Stage) -> None:
    job_type = stage.scripted(raising("INTERNAL_ERROR"), max_retries=0)
    job = stage.run_to_end(stage.kit.new_job(job_type=job_type).id)
    assert (job.lifecycle_status, job.attempt_no) == ("failed", 1)


@pytest.mark.parametrize(
    "code", ["CONTENT_SAFETY_BLOCKED", "CREDENTIAL_INVALID", "INTERNAL_CONFIG", "VALIDATION_NOTHING_TO_EXTRACT"]
)
def test_what_no_repeat_can_mend_fails_at_once_and_says_so_to_the_user(sqlite_stage: Stage, code: str) -> None:
    job_type = sqlite_stage.scripted(raising(code), max_retries=5)
    job = sqlite_stage.run_to_end(sqlite_stage.kit.new_job(job_type=job_type).id)
    assert (job.lifecycle_status, job.error_code, job.attempt_no) == ("failed", code, 1)
    assert job.public_error_message
    assert "Traceback" not in job.public_error_message


@ANY_DATABASE
def test_the_wait_that_a_provider_asks_for_is_kept(stage: Stage) -> None:
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


def test_errors_and_lost_workers_are_counted_apart_and_never_multiply(stage: Stage) -> None:
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
def test_whatever_a_script_raises_the_job_ends_and_nothing_reaches_the_worker(
    sqlite_stage: Stage, error: BaseException
) -> None:
    def script(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
        raise error

    job_type = sqlite_stage.scripted(script)
    job = sqlite_stage.run_to_end(sqlite_stage.kit.new_job(job_type=job_type).id)
    assert (job.lifecycle_status, job.error_code, job.attempt_no) == ("failed", "INTERNAL_ERROR", 2)


@pytest.mark.parametrize("code", ["CANCELLED", "LOCK_LOST", "RELEASED"])
def test_a_code_that_only_the_engine_may_use_strands_no_job(sqlite_stage: Stage, code: str) -> None:
    """A script or a provider may raise it while nobody cancelled, took over or released anything."""
    job_id = sqlite_stage.kit.new_job({"raise": code}).id
    sqlite_stage.run(job_id)
    job = sqlite_stage.kit.job(job_id)
    assert job.locked_by is None, "the attempt is over, so nobody holds the job"
    job = sqlite_stage.run_to_end(job_id) if job.lifecycle_status == "running" else job
    assert (job.lifecycle_status, job.error_code) == ("failed", code)


@pytest.mark.parametrize("answer", [None, [], "text", {"output": {}, "artifacts": "many"}, {1: 2}, {}], ids=repr)
def test_a_script_that_answers_nonsense_fails_its_job(sqlite_stage: Stage, answer: Any) -> None:
    job_type = sqlite_stage.scripted(lambda *_: answer)
    job = sqlite_stage.run_to_end(sqlite_stage.kit.new_job(job_type=job_type).id)
    assert job.lifecycle_status == "failed"
    assert job.error_code in ("INTERNAL_ERROR", "VALIDATION_OUTPUT_SCHEMA")


# --- messages that come more than once, or too late ----------------------------------------------------------------


def test_five_messages_for_one_job_are_one_run(stage: Stage) -> None:
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


def test_users_who_share_a_key_and_a_retry_are_three_jobs_whose_messages_are_never_taken_for_each_others(
    stage: Stage,
) -> None:
    kit = stage.kit
    job_type = stage.asking(JobError("CONTENT_SAFETY_BLOCKED", "no"), CARDS)
    parent, other = (
        kit.new_job(job_type=job_type, input=NOTES, idempotency_key="k1", user_id=user).id for user in ("u1", "u2")
    )
    assert stage.run(parent) == "failed"
    child = kit.jobs.retry(parent, "operator:ann").job.id
    assert kit.broker.pending_count("ai-background") == 3, "the parent's own is there still, beside its child's"
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
def test_a_late_message_changes_nothing(stage: Stage, state: str) -> None:
    job_id, _ = stage.kit.job_in(state)
    before = stage.kit.everything()
    assert stage.run(job_id) == "not_taken"
    assert stage.kit.everything() == before


@ANY_DATABASE
def test_a_message_of_no_job_changes_nothing(stage: Stage) -> None:
    job = stage.kit.new_job()
    message = stage.message(job.id)
    before = stage.kit.everything()
    assert stage.engine.execute(type(message)("no-such-job", "synthetic", "0" * 64, message.created_at)) == "not_taken"
    assert stage.kit.everything() == before


@ANY_DATABASE
def test_a_message_of_a_paused_queue_is_dropped(stage: Stage) -> None:
    job = stage.kit.new_job()
    stage.kit.pause()
    assert stage.run(job.id) == "not_taken"
    assert stage.kit.job(job.id).lifecycle_status == "queued"
    background = stage.kit.new_job(job_type=BACKGROUND_TYPE)
    assert stage.run(background.id) == "succeeded"


# --- a type that this worker doesn't know --------------------------------------------------------------------------


def _forget(stage: Stage, job_type: str) -> None:
    del stage.kit.services.registry._definitions[job_type]


def _redriven(stage: Stage, job_id: str, redrives: int) -> None:
    event = stage.kit.events(job_id)[0]
    with stage.kit.database.transaction() as session:
        stored = session.get_one(type(event), event.id)
        stored.redrives, stored.status = redrives, "published"


@ANY_DATABASE
def test_a_worker_that_does_not_know_the_type_takes_no_lock(stage: Stage, log_lines: Any) -> None:
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
def test_a_job_of_an_unknown_type_is_left_to_better_workers_at_first(stage: Stage, seconds: int, redrives: int) -> None:
    job_id = stage.kit.new_job(job_type=BACKGROUND_TYPE).id
    _forget(stage, BACKGROUND_TYPE)
    _redriven(stage, job_id, redrives)
    stage.kit.advance(seconds)
    assert stage.run(job_id) == "not_taken"
    assert stage.kit.job(job_id).lifecycle_status == "queued"


def test_a_job_whose_type_nobody_knew_for_an_hour_and_three_redrives_is_given_up(stage: Stage) -> None:
    job_id = stage.kit.new_job(job_type=BACKGROUND_TYPE).id
    _forget(stage, BACKGROUND_TYPE)
    _redriven(stage, job_id, 3)
    stage.kit.advance(3601)
    assert stage.run(job_id) == "not_taken"
    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_UNKNOWN_JOB_TYPE")
    assert stage.kit.types(job_id) == ["created", "locked", "failed"]
    told = [(row.actor, row.instance) for row in stage.kit.history(job_id)[1:]]
    assert told == [("worker", "host~boot~1~1~1~stage")] * 2, "whoever gave it up signs both"
    assert len(stage.kit.events(job_id, "ai.job.failed")) == 1


@pytest.mark.parametrize("code", ["PROVIDER_" + "X" * 60, "not a code", "", "É" * 64, "A\x00B"])
def test_an_error_code_that_no_column_holds_costs_no_job_its_failure(stage: Stage, code: str) -> None:
    """Else the reaper would give the job another worker, and the provider would be paid again."""
    job_id = stage.new_cards(stage.asking(JobError(code, "of a plug-in's own making"), max_retries=0))
    assert stage.run(job_id) == "failed"
    job = stage.kit.job(job_id)
    assert (job.error_code, job.attempt_no, job.lost_count) == ("INTERNAL_ERROR", 1, 0)
    assert "of a plug-in's own making" in stage.kit.row(job_id)["internal_error_message"]
    assert [row["error_code"] for row in stage.usage(job_id)] == ["INTERNAL_ERROR"]


def test_faults_that_quote_what_a_model_said_are_kept_whatever_it_said(stage: Stage) -> None:
    faults = ["lone \ud800", "nul \x00", "x" * 100_000, 5, "fine"]
    error = JobError("VALIDATION_OUTPUT_SEMANTICS", "odd", faults=faults)  # type: ignore[arg-type]
    job_id = stage.new_cards(stage.asking(error, CARDS))
    stage.run(job_id)
    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.retry_count, job.locked_by) == ("running", 1, None)
    assert job.answer_faults[3:] == ["5", "fine"]
    assert stage.run_to_end(job_id).lifecycle_status == "succeeded"


@ANY_DATABASE
def test_an_attempt_that_will_be_tried_again_says_so_and_not_that_it_runs(stage: Stage) -> None:
    job_id = stage.kit.new_job({"raise": "PROVIDER_UNAVAILABLE"}).id
    assert stage.run(job_id) == "retry_scheduled"
    assert stage.kit.job(job_id).lifecycle_status == "running"
