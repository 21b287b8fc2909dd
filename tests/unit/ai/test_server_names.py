"""A server's words are told where they look like words and names, and hold nothing of the key."""

from __future__ import annotations

import pytest

from aijobs.ai.providers.openai_compatible.names import name, reason

KEY = "sk-proj-0123456789abcdef"


@pytest.mark.parametrize(
    "told",
    ["gpt-5.2", "deepseek-v4-pro", "m1", "meta-llama/Llama-4:free", "accounts/x/models/y@2026-01-31", "req_01a2-B3"],
)
def test_a_name_is_told_as_it_is(told: str) -> None:
    assert name(told, KEY) == told
    assert name(told, "") == told


@pytest.mark.parametrize(
    "told",
    [KEY, KEY[4:16], f"req-{KEY[8:16]}", "two words", "", " m1", "m1\n", "m" * 129, "näme", None, 7, ["m1"], {"m": 1}],
)
def test_what_is_no_name_or_holds_a_piece_of_the_key_is_none(told: object) -> None:
    assert name(told, KEY) is None


def test_a_short_key_is_found_whole() -> None:
    assert name("req-abc", "abc") is None
    assert name("req-ab", "abc") == "req-ab"


@pytest.mark.parametrize(
    ("told", "kept"),
    [("stop", "stop"), ("content_filter", "content_filter"), (KEY, "other"), ("The notes say", "other"), ("", "other")],
)
def test_why_an_answer_ended_is_a_word_or_other(told: str, kept: str) -> None:
    assert reason(told) == kept
