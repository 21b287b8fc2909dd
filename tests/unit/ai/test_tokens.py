"""Estimation of tokens: close and deterministic."""

from __future__ import annotations

import pytest

from aijobs.ai.billing.tokens import estimate_tokens, read_count


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("a", 1),
        ("Osmosis!", 2),
        ("a" * 4000, 1000),
        ("渗透", 2),
        ("光合作用是植物的过程", 7),
        ("，。！？（）", 5),
        ("한국어", 3),
        ("🙂" * 10, 7),
        ("Клетка", 3),
        ("abcd渗透", 3),
    ],
)
def test_each_script_has_its_own_token_rate(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


def test_chinese_text_is_not_counted_at_the_english_rate() -> None:
    """An earlier defect: the rule of thumb for English makes a Chinese quota three times as large."""
    assert estimate_tokens("学" * 1000) == 700


def test_longer_text_never_has_fewer_tokens() -> None:
    text = "The cell 细胞 é Ж 🙂 " * 20
    counts = [estimate_tokens(text[:end]) for end in range(len(text))]
    assert counts == sorted(counts)


NO_COUNT = [True, False, 12.0, 12.5, float("nan"), float("inf"), "12", "", -1, 2**31, 10**30, None, [], [12], {"n": 1}]


@pytest.mark.parametrize("value", NO_COUNT, ids=repr)
def test_invalid_token_count_is_none(value: object) -> None:
    assert read_count(value) is None


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1])
def test_valid_token_count_is_returned_unchanged(value: int) -> None:
    assert read_count(value) == value
