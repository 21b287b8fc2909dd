"""Provider calls: usage rows, saved outputs, and prompts that name the faults of the last answer."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from aijobs.ai.billing.tokens import estimate_tokens
from aijobs.ai.prompts import Prompt
from aijobs.canonical import canonical_hash
from aijobs.db.database import CommitUnknown
from aijobs.definitions.projector import Artifact, ProjectionResult
from aijobs.errors import JobError
from aijobs.job_types import flashcard_generation
from aijobs.jobs.lease import lease_of
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput
from tests.integration.engine.stage import CARDS, NOTES, Stage
from tests.support.databases import ANY_DATABASE
from tests.support.lines import captured_lines
from tests.support.polling import poll


class Failing:
    """A projector that raises `times` times and then returns one artifact."""

    def __init__(self, key: str, times: int, error: Exception | None = None) -> None:
        self.key, self.calls = key, 0
        self._times, self._error = times, error or ValueError("cannot project")

    def project(self, session: Session, job: Any, validated_output: Any) -> ProjectionResult:
        self.calls += 1
        if self.calls <= self._times:
            raise self._error
        return ProjectionResult([Artifact("Thing", f"thing-{job.id}", 0)])


def test_usage_row_is_written_before_the_request_is_sent(stage: Stage) -> None:
    seen: list[list[dict[str, Any]]] = []
    prompts: list[Prompt] = []

    def answer(request: Any, token: Any) -> str:
        seen.append(stage.usage(job_id))
        prompts.append(request.prompt)
        return json.dumps(CARDS)

    job_id = stage.new_cards(stage.asking(answer))
    assert stage.run(job_id) == "succeeded"
    ((before,),), (prompt,) = seen, prompts
    assert before["prompt_tokens"] == estimate_tokens(prompt.system) + estimate_tokens(prompt.user) > 100
    assert before["estimated"], "the row that remains if the worker dies now"
    assert (before["state"], before["attempt_no"], before["call_no"], before["billed"]) == ("started", 1, 1, "unknown")
    assert before["finished_at"] is None
    (after,) = stage.usage(job_id)
    assert after["id"] == before["id"]
    assert (after["state"], after["error_code"], after["billed"], after["finish_reason"]) == (
        "done",
        None,
        "yes",
        "stop",
    )
    assert (after["prompt_tokens"], after["completion_tokens"], after["cached_tokens"]) == (100, 50, 10)
    assert (after["cost_micros"], after["currency"]) == (0, "USD"), "the price of the built-in provider is zero"
    assert after["price_version"]
    assert after["latency_ms"] is not None
    assert (after["user_id"], after["credential_mode"], after["provider"]) == ("u1", "platform_key", "local")
    assert stage.kit.types(job_id) == ["created", "locked", "provider_called", "output_saved", "succeeded"]


def test_cost_of_a_model_without_a_price_is_null(sqlite_stage: Stage) -> None:
    sqlite_stage.provider.counts = {"model": "a-model-nobody-priced"}
    job_id = sqlite_stage.new_cards(sqlite_stage.asking(CARDS))
    sqlite_stage.run(job_id)
    (call,) = sqlite_stage.usage(job_id)
    assert (call["cost_micros"], call["currency"], call["price_version"]) == (None, None, None)
    assert call["model"] == "a-model-nobody-priced"


def test_failed_calls_have_usage_rows_with_their_tokens(stage: Stage) -> None:
    stage_answers = ["not JSON", JobError("PROVIDER_UNAVAILABLE"), CARDS]
    job_id = stage.new_cards(stage.asking(*stage_answers))
    job = stage.run_to_end(job_id)
    assert (job.lifecycle_status, job.retry_count) == ("succeeded", 2)
    calls = stage.usage(job_id)
    assert [(c["attempt_no"], c["call_no"], c["state"], c["error_code"]) for c in calls] == [
        (1, 1, "failed", "VALIDATION_OUTPUT_NOT_JSON"),
        (2, 1, "failed", "PROVIDER_UNAVAILABLE"),
        (3, 1, "done", None),
    ]
    assert [(c["prompt_tokens"] == 100, c["estimated"]) for c in calls] == [(True, False), (False, True), (True, False)]
    assert [call["billed"] for call in calls] == ["yes", "unknown", "yes"]
    assert len(stage.provider.requests) == 3


@ANY_DATABASE
def test_lost_connection_is_retried_once_and_both_calls_are_possibly_billed(stage: Stage) -> None:
    job_id = stage.new_cards(stage.asking(JobError("PROVIDER_CONNECTION_LOST"), max_retries=5))
    job = stage.run_to_end(job_id)
    assert (job.lifecycle_status, job.error_code) == ("failed", "PROVIDER_CONNECTION_LOST")
    assert len(stage.provider.requests) == 2
    assert [(c["attempt_no"], c["billed"]) for c in stage.usage(job_id)] == [(1, "unknown"), (2, "unknown")]


@ANY_DATABASE
def test_retry_prompt_names_the_faults_of_the_last_answer(stage: Stage) -> None:
    job_id = stage.new_cards(stage.asking("not JSON at all", {"cards": []}, CARDS))
    stage.run_to_end(job_id)
    first, second, third = (request.prompt.user + request.prompt.system for request in stage.provider.requests)
    assert "not valid JSON" not in first
    assert "not valid JSON" in second
    assert "cards: List should have at least 1 item" in third
    assert "not valid JSON" not in third, "only the faults of the last answer"


@ANY_DATABASE
def test_truncated_answer_is_rejected_even_if_it_is_valid_json(stage: Stage) -> None:
    stage.provider.counts = {"finish_reason": "length"}
    job_id = stage.new_cards(stage.asking(CARDS, max_retries=1))
    job = stage.run_to_end(job_id)
    assert (job.lifecycle_status, job.error_code, job.output_hash) == ("failed", "VALIDATION_TRUNCATED", None)
    assert stage.kit.rows("flashcards") == []


@pytest.mark.parametrize(
    "text",
    [
        '{"cards": NaN}',
        '{"cards": [1e999]}',
        '{"cards": [' + "9" * 401 + "]}",
        '{"cards": ["\\u0000"]}',
        '{"cards": ["a\x00b"]}',
        '{"cards": ["\\ud800"]}',
        '{"cards": ' + "[" * 2000 + "]" * 2000 + "}",
        '{"cards": [], "cards": []}',
        "[]",
        '{"cards": "none"}',
    ],
    ids=["nan", "overflow", "huge integer", "escaped nul", "nul", "surrogate", "deep", "twice", "array", "schema"],
)
def test_answer_that_some_database_cannot_store_is_a_validation_error(stage: Stage, text: str) -> None:
    job_id = stage.new_cards(stage.asking(text, max_retries=0))
    job = stage.run_to_end(job_id)
    assert job.lifecycle_status == "failed"
    assert str(job.error_code).startswith("VALIDATION_OUTPUT_")
    assert stage.usage(job_id)[0]["state"] == "failed"


def test_blank_answer_is_retried_once(sqlite_stage: Stage) -> None:
    job = sqlite_stage.run_to_end(sqlite_stage.new_cards(sqlite_stage.asking("  \n\n ", max_retries=5)))
    assert (job.error_code, job.attempt_no) == ("PROVIDER_EMPTY_OUTPUT", 2)


@pytest.mark.parametrize(
    "counts",
    [
        {"finish_reason": "a finish reason that is too long for the column of its usage row"},
        {"model": "m" * 500},
        {"prompt_tokens": 10**12, "completion_tokens": 10**12, "cached_tokens": 0},
        {"prompt_tokens": 5, "cached_tokens": 50},
        {"prompt_tokens": -1, "completion_tokens": -1, "cached_tokens": -1},
        {"prompt_tokens": None, "completion_tokens": None, "cached_tokens": None},
        {"prompt_tokens": True, "completion_tokens": 1.5, "cached_tokens": "1"},
    ],
    ids=["long reason", "long model", "too many tokens", "more cached", "negative", "not counted", "no number"],
)
def test_invalid_counts_of_a_provider_do_not_lose_the_answer(stage: Stage, counts: dict[str, Any]) -> None:
    stage.provider.counts = counts
    job_id = stage.new_cards(stage.asking(CARDS))
    assert stage.run(job_id) == "succeeded"
    assert len(stage.provider.requests) == 1
    (call,) = stage.usage(job_id)
    assert call["state"] == "done"
    assert not any(call[name] == 1 for name in ("prompt_tokens", "completion_tokens", "cached_tokens"))


def test_markup_in_an_answer_is_kept_as_text_and_bidi_overrides_are_removed(sqlite_stage: Stage) -> None:
    texts = [
        "<title>",
        "List<String>",
        "if a<b and c>d",
        "<script src=//x.example ",
        '<iframe src="x">',
        "a\u202eb\u2069c",
    ]
    (card, *_rest) = CARDS["cards"]
    fronts = [f"Which number {n} is meant?" for n in range(len(texts))]
    answer = {"cards": [{**card, "front": front, "back": back} for front, back in zip(fronts, texts, strict=True)]}
    notes = {**NOTES, "options": {**NOTES["options"], "max_cards": 10}}
    job_type = sqlite_stage.asking(answer)
    job_id = sqlite_stage.kit.jobs.create_job(CreateJobInput("u1", job_type, "note", "note-1", notes)).job.id

    assert sqlite_stage.run(job_id) == "succeeded"

    backs = {row["front"]: row["back"] for row in sqlite_stage.kit.rows("flashcards", job_id=job_id)}
    assert [backs[front] for front in fronts] == [*texts[:-1], "abc"]
    assert len(sqlite_stage.provider.requests) == 1


def test_cancel_stops_a_running_output_check(sqlite_stage: Stage) -> None:
    checking, returned = threading.Event(), threading.Event()

    def check(notes: Any, output: Any, job_id: str, token: Any) -> dict[str, Any]:
        checking.set()
        try:
            poll(token.raise_if_cancelled, what="the check is stopped")
        finally:
            returned.set()
        return dict(output)

    output = replace(flashcard_generation.DEFINITION.output, validator=check, watches_token=True)
    sqlite_stage.provider.answers[:] = [CARDS]
    job_type = sqlite_stage.define(replace(flashcard_generation.DEFINITION, output=output))
    job_id = sqlite_stage.new_cards(job_type)
    delivery = sqlite_stage.start(job_id)
    assert checking.wait(10)
    sqlite_stage.kit.lifecycle.request_cancel(job_id, "user:u1")

    assert delivery.wait() == "cancelled"
    assert returned.wait(10)


def test_saved_output_is_projected_without_another_call(stage: Stage) -> None:
    projector = Failing("fails_once", 1)
    job_id = stage.new_cards(stage.asking(CARDS, projector=projector))
    stage.run(job_id)
    saved = stage.kit.row(job_id)
    assert (saved["lifecycle_status"], saved["artifact_count"]) == ("running", 0)
    assert saved["output_hash"] == canonical_hash(saved["validated_output"])
    job = stage.run_to_end(job_id)
    assert (job.lifecycle_status, job.artifact_count, job.attempt_no) == ("succeeded", 1, 2)
    assert len(stage.provider.requests) == 1
    assert len(stage.usage(job_id)) == 1
    assert stage.kit.row(job_id)["validated_output"] == saved["validated_output"]
    assert stage.kit.types(job_id) == [
        "created",
        "locked",
        "provider_called",
        "output_saved",
        "retry_scheduled",
        "locked",
        "succeeded",
    ]


@ANY_DATABASE
def test_retry_by_an_operator_uses_the_saved_output(stage: Stage) -> None:
    projector = Failing("fails_twice", 2)
    parent = stage.new_cards(stage.asking(CARDS, projector=projector))
    assert stage.run_to_end(parent).error_code == "INTERNAL_PROJECTION"
    child = stage.kit.jobs.retry(parent, "operator:ann").job
    job = stage.run_to_end(child.id)
    assert (job.lifecycle_status, job.artifact_count) == ("succeeded", 1)
    assert job.output_hash == stage.kit.job(parent).output_hash
    assert stage.usage(child.id) == []
    assert len(stage.provider.requests) == 1


@ANY_DATABASE
def test_provider_call_holds_no_database_connection(stage: Stage) -> None:
    stage.engine.close()  # The watcher uses a connection now and then.
    held: list[Any] = []
    pool: Any = stage.kit.database.engine.pool

    def answer(request: Any, token: Any) -> str:
        held.append(pool.checkedout())
        return json.dumps(CARDS)

    assert stage.run(stage.new_cards(stage.asking(answer))) == "succeeded"
    assert held == [0]


def test_call_whose_opening_commit_answer_is_lost_has_one_usage_row(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost after COMMIT; the work must not be repeated."""
    database, unsure = stage.kit.database, ["provider_called", "output_saved", "retry_scheduled"]
    once = database._once

    def lossy(*work: Any) -> Any:
        result = once(*work)
        types = [row.type for row in stage.kit.history(job_id)]
        if unsure and types[-1:] == [unsure[0]]:
            unsure.pop(0)
            raise CommitUnknown(_disconnected())
        return result

    job_id = stage.new_cards(stage.asking(CARDS, projector=Failing("fails_for_ever", 99)))
    monkeypatch.setattr(database, "_once", lossy)
    stage.run(job_id)
    assert unsure == []
    assert stage.kit.types(job_id) == ["created", "locked", "provider_called", "output_saved", "retry_scheduled"]
    assert len(stage.provider.requests) == 1
    (call,) = stage.usage(job_id)
    assert (call["call_no"], call["state"]) == (1, "done")


def _disconnected() -> Any:
    return OperationalError("COMMIT", {}, Exception("gone"), connection_invalidated=True)


@ANY_DATABASE
def test_output_saved_by_another_attempt_does_not_confirm_the_own_commit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The COMMIT had no effect; before it is confirmed, another worker locks the job and saves an output."""
    stage.engine.close()
    database, taken = stage.kit.database, list[str]()
    once = database._once

    def lossy(*work: Any) -> Any:
        if taken or stage.kit.types(job_id)[-1] != "provider_called":
            return once(*work)
        taken.append(job_id)
        held = stage.kit.job(job_id)
        assert held.lock_until is not None
        stage.kit.lifecycle.expire(lease_of(held), held.lock_until, at_once=True)
        stage.kit.lifecycle.save_output(stage.kit.lock(job_id, "worker-2"), {"other": 1})
        raise CommitUnknown(_disconnected())

    job_id = stage.new_cards(stage.asking(CARDS))
    monkeypatch.setattr(database, "_once", lossy)
    with captured_lines() as lines:
        assert stage.run(job_id) == "lost"
        assert taken == [job_id]
        assert "job.output_saved" not in [line["event"] for line in lines()]
    (call,) = stage.usage(job_id)
    assert call["prompt_tokens"] == 100, "the cost is recorded"
    assert stage.kit.job(job_id).output_hash == canonical_hash({"other": 1})


def test_progress_is_visible_while_an_attempt_runs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aijobs.engine.progress.EVERY_S", 0.0)
    seen: list[int] = []

    def read() -> None:
        seen.append(stage.kit.job(job_id).progress)

    def answer(request: Any, token: Any) -> str:
        read()
        for percent in (50, 20, 100):
            token.progress(percent)
            read()
        return json.dumps(CARDS)

    class Reading:
        key = "reading"

        def project(self, session: Session, job: Any, validated_output: Any) -> ProjectionResult:
            seen.append(session.execute(select(AiJob.progress).where(AiJob.id == job.id)).scalar_one())
            return ProjectionResult([])

    job_id = stage.new_cards(stage.asking(answer, projector=Reading()))
    assert stage.run(job_id) == "succeeded"
    read()
    assert seen == [10, 45, 45, 80, 90, 100]
    assert stage.kit.types(job_id) == ["created", "locked", "provider_called", "output_saved", "succeeded"]


def test_attempt_with_a_saved_output_begins_at_90_percent(stage: Stage) -> None:
    job_id = stage.new_cards(stage.asking(CARDS, projector=Failing("fails_in_the_middle", 1)))
    stage.run(job_id)
    stage.kit.advance(10)
    assert stage.kit.job(stage.kit.lock(job_id).job_id).progress == 90


@ANY_DATABASE
def test_progress_of_a_script_is_ignored_after_its_lease_is_lost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aijobs.engine.progress.EVERY_S", 0.0)
    stage.engine.close()

    def script(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
        context.progress(50)
        assert stage.kit.job(job_id).progress == 45
        held = stage.kit.job(job_id)
        assert held.lock_until is not None
        stage.kit.lifecycle.expire(lease_of(held), held.lock_until, at_once=True)
        stage.kit.lock(job_id, "worker-2")
        context.progress(90)
        return {"output": {}, "artifacts": 0}

    job_id = stage.kit.new_job(job_type=stage.scripted(script)).id
    assert stage.run(job_id) == "lost"
    assert stage.kit.job(job_id).progress == 0, "the progress of the newer attempt"
