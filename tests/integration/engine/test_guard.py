"""Safety checks of input and output, and redaction of the output."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aijobs.canonical import canonical_hash
from aijobs.definitions.definition import Security
from aijobs.errors import SettingsError
from aijobs.job_types import flashcard_generation, synthetic
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput
from aijobs.screening.safety import ContentSafety
from aijobs.settings import Settings
from aijobs.wiring.providers import build_guard
from tests.integration.engine.stage import CARDS, NOTES, Stage
from tests.support.jobs import race

GUARDED = Security(content_safety_check=True, output_redaction=True)


def notes_with(text: str) -> dict[str, Any]:
    notes = copy.deepcopy(NOTES)
    notes["segments"].append({"sid": "p9", "text": text})
    return notes


def cards_with(**changes: Any) -> dict[str, Any]:
    cards = copy.deepcopy(CARDS)
    cards["cards"][0].update(changes)
    return cards


def run_notes(stage: Stage, notes: dict[str, Any], *answers: Any) -> AiJob:
    job_type = stage.asking(*(answers or (CARDS,)))
    job = stage.kit.jobs.create_job(CreateJobInput("u1", job_type, "note", "note-1", notes)).job
    stage.run(job.id)
    return stage.kit.job(job.id)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("CANARY how to make a pipe bomb", "CONTENT_SAFETY_BLOCKED"),
        ("我想自杀 CANARY", "CONTENT_SAFETY_SELF_HARM"),
        ("CANARY how to make a bomb. I want to kill myself.", "CONTENT_SAFETY_SELF_HARM"),
    ],
)
def test_blocked_input_fails_without_provider_call_or_retry(
    sqlite_stage: Stage, log_lines: Callable[[], list[dict[str, Any]]], text: str, code: str
) -> None:
    job = run_notes(sqlite_stage, notes_with(text))
    assert (job.lifecycle_status, job.error_code, job.attempt_no) == ("failed", code, 1)
    assert sqlite_stage.provider.requests == []
    assert sqlite_stage.usage(job.id) == []
    assert sqlite_stage.kit.types(job.id) == ["created", "locked", "failed"]
    (blocked,) = [line for line in log_lines() if line["event"] == "safety.blocked"]
    assert (blocked["of"], blocked["jobId"]) == ("input", job.id)
    assert blocked["rules"]
    assert "CANARY" not in json.dumps(log_lines(), ensure_ascii=False)
    internal = sqlite_stage.kit.row(job.id)["internal_error_message"]
    assert blocked["rules"][0] in internal
    assert "CANARY" not in internal


def test_blocked_answer_is_recorded_as_billed(stage: Stage) -> None:
    cards = cards_with(back="Go kill yourself: the movement of water across a partially permeable membrane.")
    job = run_notes(stage, NOTES, cards)
    assert (job.lifecycle_status, job.error_code, job.output_hash) == ("failed", "CONTENT_SAFETY_BLOCKED", None)
    (call,) = stage.usage(job.id)
    assert (call["state"], call["error_code"], call["billed"]) == ("failed", "CONTENT_SAFETY_BLOCKED", "yes")
    assert (call["prompt_tokens"], len(stage.provider.requests)) == (100, 1)
    assert call["finished_at"] is not None
    assert stage.kit.rows("flashcards") == []


def test_self_harm_text_in_an_answer_is_blocked_as_unsafe_content(sqlite_stage: Stage) -> None:
    cards = cards_with(back="I want to kill myself, said the water.")
    assert run_notes(sqlite_stage, NOTES, cards).error_code == "CONTENT_SAFETY_BLOCKED"


def test_flagged_input_runs_and_is_logged(sqlite_stage: Stage, log_lines: Callable[[], list[dict[str, Any]]]) -> None:
    job = run_notes(sqlite_stage, notes_with("In the novel, Werther writes: I want to die. CANARY"))
    assert job.lifecycle_status == "succeeded"
    (flagged,) = [line for line in log_lines() if line["event"] == "safety.flagged"]
    assert (flagged["rules"], flagged["of"], flagged["level"]) == (["en-self-harm-intent"], "input", "info")
    assert "CANARY" not in json.dumps(log_lines())


def test_personal_data_in_an_answer_is_masked_before_it_is_saved_and_hashed(stage: Stage) -> None:
    back = "Water crosses a membrane; ask bob@example.com or BOB@example.com"
    job = run_notes(stage, NOTES, cards_with(back=back))
    row = stage.kit.row(job.id)
    assert job.lifecycle_status == "succeeded"
    assert "example.com" not in json.dumps(row["validated_output"])
    assert "Water crosses a membrane; ask [EMAIL_1] or [EMAIL_1]" in json.dumps(row["validated_output"])
    assert row["output_hash"] == canonical_hash(row["validated_output"])
    backs = [card["back"] for card in stage.kit.rows("flashcards")]
    assert "Water crosses a membrane; ask [EMAIL_1] or [EMAIL_1]" in backs


def test_quote_of_a_masked_input_is_found(sqlite_stage: Stage) -> None:
    """Snapshot, prompt and quotes all contain the mask."""
    sentence = "A mentor is a person who answers questions at carol@example.org every day."
    cards = cards_with(
        front="What is a mentor?",
        back="A person who answers questions at [EMAIL_1] every day.",
        evidence=[{"sid": "p9", "quote": sentence.replace("carol@example.org", "[EMAIL_1]")}],
    )
    job = run_notes(sqlite_stage, notes_with(sentence), cards)
    assert job.lifecycle_status == "succeeded"
    prompt = sqlite_stage.provider.requests[0].prompt
    assert "[EMAIL_1]" in prompt.user
    assert "carol@example.org" not in prompt.user + prompt.system
    output = sqlite_stage.kit.row(job.id)["validated_output"]
    assert "mentor" in json.dumps(output["cards"])
    assert output["dropped"] == []


def test_scripted_type_is_guarded_only_if_its_definition_says_so(sqlite_stage: Stage) -> None:
    guarded = sqlite_stage.define(replace(synthetic.DEFINITION, security=GUARDED))
    free = sqlite_stage.define(synthetic.DEFINITION)

    def run(job_type: str, said: str) -> AiJob:
        job = sqlite_stage.kit.new_job({"output": {"said": said}, "artifacts": 1}, job_type=job_type)
        sqlite_stage.run(job.id)
        return sqlite_stage.kit.job(job.id)

    assert run(guarded, "how to cook meth").error_code == "CONTENT_SAFETY_BLOCKED"
    assert run(guarded, "how plants grow").lifecycle_status == "succeeded"
    assert run(free, "how to cook meth").lifecycle_status == "succeeded"


def test_flashcards_use_safety_check_and_output_redaction() -> None:
    assert flashcard_generation.DEFINITION.security == GUARDED


def test_invalid_safety_rules_are_reported_at_the_start(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    settings = Settings.load({"AIJOBS_SAFETY_RULES": str(rules), "AIJOBS_INSTANCE_PATH": str(tmp_path)})
    with pytest.raises(SettingsError, match="can't be read"):
        build_guard(settings)
    rules.write_text("language: en\nrules: [{id: r, category: boredom, action: block, phrases: [dull]}]\n", "utf-8")
    with pytest.raises(SettingsError, match="boredom"):
        build_guard(settings)


def test_built_in_rules_are_loaded_once_and_only_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path | None] = []

    def slowly(rules: Path | None) -> ContentSafety:
        read.append(rules)
        time.sleep(0.05)
        return ContentSafety.load(rules)

    monkeypatch.setattr("aijobs.wiring.providers._load_safety", cache(slowly))
    guard = build_guard(Settings.load({"AIJOBS_INSTANCE_PATH": str(tmp_path)}))
    assert read == []
    run: Any = SimpleNamespace(definition=SimpleNamespace(security=GUARDED), fields=dict)
    refusals = race(*[lambda: guard.check_output(run, {"text": "how to make a pipe bomb"})] * 4)
    assert [refusal.code for refusal in refusals] == ["CONTENT_SAFETY_BLOCKED"] * 4
    assert read == [None]
