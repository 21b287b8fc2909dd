"""Moderation of input and output by a provider: refusals, cost and failures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from aijobs.ai.calling.breaker import scope_of
from aijobs.engine import moderation
from aijobs.job_types import flashcard_generation
from aijobs.testing.fakellm import Answer, Call, faults
from aijobs.testing.fakellm.moderation import Moderate
from aijobs.testing.fakellm.request import MODERATION
from tests.integration.ai.conftest import KEY, Live, LiveOpener
from tests.support.polling import poll

FINE = Moderate()
OWN_KEY = "sk-user-abcdefghijklmnop"


@pytest.fixture
def judged(open_live: LiveOpener, monkeypatch: pytest.MonkeyPatch) -> Live:
    """A live stage whose provider moderates too, with short pauses between tries."""
    monkeypatch.setattr(moderation, "AGAIN_AFTER_S", (0.01, 0.01, 0.01))
    return open_live(moderation_model="judge")


def judgements(live: Live) -> list[Call]:
    return [call for call in live.llm.log if call.request.kind == MODERATION]


def rows(live: Live, job_id: str, *columns: str) -> list[Sequence[Any]]:
    return [tuple(row[column] for column in columns) for row in live.stage.usage(job_id)]


# --- findings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("category", "code"),
    [
        ("violence", "CONTENT_SAFETY_BLOCKED"),
        ("self-harm", "CONTENT_SAFETY_BLOCKED"),
        ("self-harm/intent", "CONTENT_SAFETY_SELF_HARM"),
        ("a category of tomorrow", "CONTENT_SAFETY_BLOCKED"),
    ],
)
def test_flagged_input_fails_the_job_before_any_call(open_live: LiveOpener, category: str, code: str) -> None:
    live = open_live(moderation_model="judge")
    live.llm.flag("osmosis", category)
    job = live.run(Answer())
    assert (job.error_code, live.llm.calls) == (code, [])
    (row,) = live.stage.usage(job.id)
    assert (row["model"], row["state"], row["estimated"], row["error_code"]) == ("judge", "done", True, None)
    assert "tomorrow" not in live.stage.kit.row(job.id)["internal_error_message"]


def test_flagged_output_is_paid_for_but_not_saved(open_live: LiveOpener) -> None:
    live = open_live(moderation_model="judge")
    live.llm.flag("{{c1::", "illicit")
    job = live.run(Answer())
    assert (job.error_code, len(live.llm.calls)) == ("CONTENT_SAFETY_BLOCKED", 1)
    assert [(row["model"], row["state"]) for row in live.stage.usage(job.id)] == [
        ("judge", "done"),
        ("m1", "done"),
        ("judge", "done"),
    ]
    assert live.stage.kit.row(job.id)["validated_output"] is None


def test_failed_moderation_lets_nothing_through(open_live: LiveOpener) -> None:
    live = open_live(moderation_model="judge")
    live.llm.script(faults.server_error(), kind="moderation")
    job = live.run(Answer())
    assert (job.error_code, live.llm.calls) == ("PROVIDER_UNAVAILABLE", [])
    assert [row["state"] for row in live.stage.usage(job.id)] == ["failed"] * 3


# --- failures ------------------------------------------------------------------------------------------------------


def test_failed_moderation_of_a_paid_answer_is_repeated(judged: Live) -> None:
    judged.llm.script(FINE, faults.server_error(), FINE, kind="moderation")
    job = judged.run(Answer())
    assert (job.lifecycle_status, job.retry_count, len(judged.llm.calls)) == ("succeeded", 0, 1)
    assert rows(judged, job.id, "model", "state", "attempt_no", "call_no") == [
        ("judge", "done", 1, 1),
        ("m1", "done", 1, 2),
        ("judge", "failed", 1, 3),
        ("judge", "done", 1, 4),
    ]


def test_answer_without_moderation_is_not_saved(judged: Live) -> None:
    judged.llm.script(FINE, faults.server_error(), kind="moderation")
    job = judged.run(Answer(), job_type=judged.stage.define(flashcard_generation.DEFINITION, max_retries=0))
    assert (job.error_code, len(judged.llm.calls), len(judgements(judged))) == ("PROVIDER_UNAVAILABLE", 1, 5)
    assert judged.stage.kit.row(job.id)["validated_output"] is None
    assert rows(judged, job.id, "model", "state", "billed")[1] == ("m1", "done", "yes")


@pytest.mark.parametrize("step", [faults.no_balance(), faults.bad_key()])
def test_moderation_is_not_repeated_after_a_permanent_error(judged: Live, step: Any) -> None:
    judged.llm.script(FINE, step, kind="moderation")
    judged.run(Answer())
    assert (len(judged.llm.calls), len(judgements(judged))) == (1, 2)


def test_job_whose_answer_cannot_be_moderated_is_retried_and_not_postponed(
    open_live: LiveOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postponed, it would pay for the answer again each time, for as long as a job may wait for providers."""
    monkeypatch.setattr(moderation, "AGAIN_AFTER_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(moderation, "LONGEST_WAIT_S", 0.1)
    live = open_live(moderation_model="judge", failures=1)
    live.llm.script(FINE, faults.server_error(), kind="moderation")
    live.llm.script(Answer())
    job_id = live.new()
    live.stage.run(job_id)
    job = live.stage.kit.job(job_id)
    assert (job.retry_count, live.stage.kit.types(job_id)[-1]) == (1, "retry_scheduled")
    assert {state for (state,) in rows(live, job_id, "state")} == {"done", "failed"}, "no usage row is left open"


def test_attempt_that_waits_for_moderation_ends_at_once_when_cancelled(
    open_live: LiveOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moderation, "AGAIN_AFTER_S", (50.0,))
    live = open_live(moderation_model="judge")
    live.llm.script(FINE, faults.server_error(), kind="moderation")
    live.llm.script(Answer())
    job_id = live.new()
    delivery = live.stage.start(job_id)
    poll(lambda: len(judgements(live)) == 2, what="the output's judgement failed")
    live.stage.kit.lifecycle.request_cancel(job_id, "user:u1")
    assert delivery.wait() == "cancelled"


# --- usage, limits and keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [faults.no_balance(), faults.bad_key()])
def test_jobs_are_postponed_after_moderation_failed_permanently(judged: Live, step: Any) -> None:
    judged.llm.script(step, kind="moderation")
    first = judged.run(Answer())
    assert first.lifecycle_status == "failed"
    others = [judged.new() for _ in range(3)]
    assert [judged.stage.run(job_id) for job_id in others] == ["postponed"] * 3
    assert (len(judgements(judged)), judged.llm.calls) == (1, [])
    assert [judged.stage.usage(job_id) for job_id in others] == [[]] * 3


def test_moderation_counts_towards_the_providers_call_limit(open_live: LiveOpener) -> None:
    live = open_live(moderation_model="judge", max_concurrent_calls=1)
    live.llm.script(Answer(delta_s=0.02))
    first = live.stage.start(live.new())
    (call,) = live.llm.wait_for_calls(1)
    second = live.stage.start(live.new())
    assert (first.wait(30), second.wait(30)) == ("succeeded", "succeeded")
    ended = call.received_at + timedelta(seconds=call.ended_after_s or 0)
    # The next client may enter while the server still records the end of the previous one.
    assert all(judgement.received_at > ended - timedelta(seconds=0.05) for judgement in judgements(live)[1:])


def test_platform_pays_for_moderation_of_jobs_on_a_users_key(judged: Live) -> None:
    job_id, _ = judged.new_on(OWN_KEY)
    judged.llm.script(Answer())
    assert judged.stage.run_to_end(job_id).lifecycle_status == "succeeded"
    assert rows(judged, job_id, "model", "credential_mode") == [
        ("judge", "platform_key"),
        ("m1", "user_deepseek_key"),
        ("judge", "platform_key"),
    ]
    assert [call.key for call in judged.llm.log] == [KEY, OWN_KEY, KEY]


def test_postponed_job_is_not_moderated(judged: Live) -> None:
    job_id, credential_id = judged.new_on(OWN_KEY)
    judged.breaker.failed(scope_of("acme", credential_id), exhausted=True)
    assert judged.stage.run(job_id) == "postponed"
    assert (judged.llm.log, judged.stage.usage(job_id)) == ([], [])
