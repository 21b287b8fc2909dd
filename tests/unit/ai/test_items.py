"""Rules for items of every job type."""

from __future__ import annotations

import pytest

from aijobs.errors import JobError
from aijobs.learning.items import Questions, require_enough, shuffled, text_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("What is pH < 7?", None),
        ("a<b and c>d", None),
        ("What does <title> hold? What is a List<String>?", None),
        ("if x<y then", None),
        ("two\nlines", None),
        ("  ", "blank"),
        ("x" * 11 * 10, "longer"),
        ("bell\x07", "control"),
        ("<script src=//x.example ", None),
        ('<iframe src="x">', None),
        ("<!-- note -->", None),
    ],
)
def test_unshowable_text_is_named(text: str, fault: str | None) -> None:
    found = text_fault(text, 100)

    assert (found is None) if fault is None else (found is not None and fault in found)


def kept(*texts: str) -> list[bool]:
    questions = Questions()
    return [questions.add(text) for text in texts]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is osmosis?", "What is the osmosis?"),
        ("WHAT IS OSMOSIS", "What is osmosis?"),
        ("什么是光合作用？", "光合作用是什么？"),
        ("Explain how green plants turn light energy, water and carbon dioxide into sugar and oxygen for growth",
         "Explain how green plants turn light energy, water and carbon dioxide into sugar and oxygen for life, growth"),
    ],
)  # fmt: skip
def test_near_duplicates_are_detected(one: str, other: str) -> None:
    assert kept(one, other) == [True, False]
    assert kept(other, one) == [True, False]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is osmosis?", "What is mitosis?"),
        ("Who was Henry VII?", "Who was Henry VIII?"),
        ("What happened in 1789?", "What happened in 1799?"),
        ("什么是光反应？", "什么是暗反应？"),
        ("什么是细胞？", "什么是细胞壁？"),
    ],
)
def test_similar_but_different_questions_are_kept(one: str, other: str) -> None:
    assert kept(one, other) == [True, True]


def test_questions_keep_each_question_once() -> None:
    questions = Questions()

    kept = [questions.add(text) for text in ("What is osmosis?", "What is mitosis?", "What is the osmosis?")]

    assert kept == [True, True, False]


def test_shuffled_order_depends_on_the_job_and_is_stable() -> None:
    items = list(range(20))

    first = shuffled(items, "job-a")

    assert sorted(first) == items
    assert first != items
    assert shuffled(items, "job-a") == first
    assert shuffled(items, "job-b") != first


@pytest.mark.parametrize(("kept", "asked_for"), [(1, 1), (3, 5), (6, 10), (2, 3)])
def test_sixty_percent_of_the_items_are_enough(kept: int, asked_for: int) -> None:
    require_enough(kept, asked_for, ["odd"] * (asked_for - kept))

    assert kept >= 0.6 * asked_for


@pytest.mark.parametrize(("kept", "asked_for"), [(0, 0), (0, 1), (2, 5), (5, 10)])
def test_too_few_items_are_refused_with_the_commonest_reasons_first(kept: int, asked_for: int) -> None:
    with pytest.raises(JobError) as caught:
        require_enough(kept, asked_for, ["rare", "common", "common"])

    assert caught.value.code == "VALIDATION_OUTPUT_SEMANTICS"
    assert caught.value.faults == ("common", "rare")
