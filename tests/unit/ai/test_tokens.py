"""An estimate of tokens that errs little, and the same way each time."""

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
def test_each_script_counts_at_its_own_rate(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


def test_a_chinese_text_is_not_counted_as_if_four_signs_were_a_token() -> None:
    """The mistake of English rules of thumb, which makes a Chinese quota three times as large."""
    assert estimate_tokens("学" * 1000) == 700


def test_longer_text_is_never_fewer_tokens() -> None:
    text = "The cell 细胞 é Ж 🙂 " * 20
    counts = [estimate_tokens(text[:end]) for end in range(len(text))]
    assert counts == sorted(counts)


NO_COUNT = [True, False, 12.0, 12.5, float("nan"), float("inf"), "12", "", -1, 2**31, 10**30, None, [], [12], {"n": 1}]


@pytest.mark.parametrize("told", NO_COUNT, ids=repr)
def test_a_value_that_is_no_count_of_tokens_is_unknown(told: object) -> None:
    assert read_count(told) is None


@pytest.mark.parametrize("told", [0, 1, 2**31 - 1])
def test_a_count_of_tokens_is_taken_as_it_is(told: int) -> None:
    assert read_count(told) == told
