"""A server's names are recorded only if they look like names and contain no part of the key."""

from __future__ import annotations

import pytest

from aijobs.ai.providers.openai_compatible.names import name, reason

KEY = "sk-proj-0123456789abcdef"


@pytest.mark.parametrize(
    "value",
    ["gpt-5.2", "deepseek-v4-pro", "m1", "meta-llama/Llama-4:free", "accounts/x/models/y@2026-01-31", "req_01a2-B3"],
)
def test_valid_name_is_returned_unchanged(value: str) -> None:
    assert name(value, KEY) == value
    assert name(value, "") == value


@pytest.mark.parametrize(
    "value",
    [KEY, KEY[4:16], f"req-{KEY[8:16]}", "two words", "", " m1", "m1\n", "m" * 129, "näme", None, 7, ["m1"], {"m": 1}],
)
def test_invalid_name_or_name_with_part_of_the_key_is_none(value: object) -> None:
    assert name(value, KEY) is None


def test_short_key_is_matched_only_as_a_whole() -> None:
    assert name("req-abc", "abc") is None
    assert name("req-ab", "abc") == "req-ab"


@pytest.mark.parametrize(
    ("value", "kept"),
    [("stop", "stop"), ("content_filter", "content_filter"), (KEY, "other"), ("The notes say", "other"), ("", "other")],
)
def test_finish_reason_is_a_word_or_other(value: str, kept: str) -> None:
    assert reason(value) == kept
