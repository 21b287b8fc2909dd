"""Flashcards: valid input, valid answers, and which cards are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from aijobs.errors import JobError
from aijobs.job_types.flashcard_generation import (
    DEFINITION,
    JUNK_OUTPUTS,
    MAX_CARDS,
    SAMPLE_INPUT,
    SAMPLE_OUTPUT,
    Input,
    Output,
    check,
)
from tests.support.counting import count_calls

NOTES = (
    "Osmosis is the movement of water across a membrane. Diffusion is the spreading of particles. "
    "Mitosis makes two equal cells. Meiosis makes four cells. Water boils at 100 °C at sea level."
)
QUOTES = {
    "osmosis": "Osmosis is the movement of water across a membrane.",
    "diffusion": "Diffusion is the spreading of particles.",
    "mitosis": "Mitosis makes two equal cells.",
    "meiosis": "Meiosis makes four cells.",
    "water": "Water boils at 100 °C at sea level.",
}


def notes(
    max_cards: int = 10, lang: str = "en", text: str = NOTES, types: tuple[str, ...] = ("basic", "cloze")
) -> dict[str, Any]:
    return {
        "lang": lang,
        "source": {"id": "n", "title": "Biology"},
        "segments": [{"sid": "p1", "text": text}, {"sid": "p2", "text": "植物利用光能制造有机物。"}],
        "options": {"max_cards": max_cards, "card_types": list(types)},
    }


def basic(about: str = "osmosis", **changes: Any) -> dict[str, Any]:
    card = {
        "card_type": "basic",
        "front": f"What is {about}?",
        "back": f"What the notes say of {about}.",
        "tags": ["biology"],
        "difficulty": "easy",
        "evidence": [{"sid": "p1", "quote": QUOTES[about], "start": None, "end": None}],
    }
    return {**card, **changes}


def cloze(
    text: str = "Water boils at {{c1::100 °C}} at sea level.", about: str = "water", **changes: Any
) -> dict[str, Any]:
    card = {
        "card_type": "cloze",
        "text": text,
        "hint": None,
        "tags": [],
        "difficulty": "medium",
        "evidence": [{"sid": "p1", "quote": QUOTES[about], "start": None, "end": None}],
    }
    return {**card, **changes}


GOOD = [basic("osmosis"), basic("diffusion"), basic("mitosis"), basic("meiosis")]


def dropped(card: dict[str, Any], given: dict[str, Any] | None = None) -> str | None:
    """Return why `card` is dropped when it follows good ones, or None if it is kept."""
    checked = check(given or notes(), {"cards": [*GOOD, card]}, "job-1")
    return checked["dropped"][0]["reason"] if checked["dropped"] else None


# -- input ----------------------------------------------------------------------------------------------------


def with_change(path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(SAMPLE_INPUT)
    place: Any = changed
    *parents, last = path.split(".")
    for name in parents:
        place = place[int(name)] if name.isdigit() else place[name]
    place[last] = value
    return changed


BAD_INPUT = [
    ("lang", "de"),
    ("lang", None),
    ("surprise", 1),
    ("source.title", ""),
    ("source.title", "x" * 301),
    ("source.title", "a\x00b"),
    ("source.title", "a\nb"),
    ("source.title", " a"),
    ("source.id", "\ud800"),
    ("source.id", 7),
    ("segments", []),
    ("segments", "text"),
    ("segments", [{"sid": "p1", "text": "a"}] * 2),
    ("segments", [{"sid": f"p{n}", "text": "a"} for n in range(201)]),
    ("segments", [{"sid": f"p{n}", "text": "a" * 20_001} for n in range(3)]),
    ("segments.0.sid", ""),
    ("segments.0.sid", "s" * 65),
    ("segments.0.sid", "a b"),
    ("segments.0.sid", "a\n"),
    ("segments.0.text", "  \n"),
    ("segments.0.text", "x" * 60_001),
    ("segments.0.text", "nul \x00 here"),
    ("segments.0.text", "half \ud800 here"),
    ("segments.0.text", 5),
    ("segments.0.more", "x"),
    ("options.max_cards", 0),
    ("options.max_cards", MAX_CARDS + 1),
    ("options.max_cards", "5"),
    ("options.max_cards", True),
    ("options.max_cards", 2.0),
    ("options.max_cards", float("nan")),
    ("options.max_cards", 10**400),
    ("options.card_types", []),
    ("options.card_types", ["poem"]),
    ("options.card_types", ["basic", "cloze", "basic"]),
]


@pytest.mark.parametrize(("path", "value"), BAD_INPUT, ids=[f"{path}-{n}" for n, (path, _) in enumerate(BAD_INPUT)])
def test_invalid_input_is_refused_and_the_field_named(path: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Input.model_validate(with_change(path, value))

    named = {".".join(str(part) for part in error["loc"]) for error in caught.value.errors(include_input=False)}
    assert any(name.startswith(path) or (path.startswith(name) and name) for name in named)


@pytest.mark.parametrize("text", ["👩🏽‍🚀 \U0010ffff \u202e e\u0301", "a\r\nb\tc\x0c", "{{7*7}} ${x} %s"])
def test_any_text_without_nul_and_lone_surrogates_is_accepted(text: str) -> None:
    model = Input.model_validate(with_change("segments.0.text", text))

    assert model.segments[0].text == text


def test_options_may_be_left_out() -> None:
    given = {name: value for name, value in SAMPLE_INPUT.items() if name != "options"}

    assert Input.model_validate(given).model_dump()["options"] == {"max_cards": 20, "card_types": ["basic", "cloze"]}


# -- output ---------------------------------------------------------------------------------------------------


def test_sample_output_is_accepted_and_kept_completely() -> None:
    output = Output.model_validate(SAMPLE_OUTPUT).model_dump(mode="json")

    checked = check(SAMPLE_INPUT, output, "job-1")

    assert checked["dropped"] == []
    assert {card["card_type"] for card in checked["cards"]} == {"basic", "cloze"}
    assert Output.model_validate(checked).model_dump(mode="json") == checked


@pytest.mark.parametrize("junk", JUNK_OUTPUTS)
def test_invalid_output_is_refused_by_the_schema(junk: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Output.model_validate(junk)


def test_evidence_is_replaced_by_the_verbatim_quote_and_its_place() -> None:
    evidence = {"sid": "p1", "quote": "OSMOSIS is the  movement of water", "start": 999, "end": -1}

    checked = check(notes(), {"cards": [basic(evidence=[evidence])]}, "job-1")

    assert checked["cards"][0]["evidence"] == [
        {"sid": "p1", "quote": "Osmosis is the movement of water", "start": 0, "end": 32}
    ]


DROPPED = [
    (basic("water", evidence=[{"sid": "p1", "quote": "Water boils at 90 °C."}]), "quote"),
    (basic("water", evidence=[{"sid": "p2", "quote": QUOTES["water"]}]), "quote"),
    (basic("water", evidence=[{"sid": "p9", "quote": QUOTES["water"]}]), "quote"),
    (basic("water", evidence=[{"sid": "p1", "quote": "W"}]), "quote"),
    (basic("water", front="Water?", back="water"), "same"),
    (basic("water", front="  "), "front is blank"),
    (basic("water", back="x" * 1001), "back is longer"),
    (basic("water", back="bell \x07 rings"), "control"),
    (basic("water", front="What is {{c1::water}}?"), "gap marks"),
    (basic("water", front="水在多少度沸腾？", back="一百摄氏度。"), "language"),
    (basic("water", front="What is the osmosis?"), "another card"),
    (cloze("Water boils at 100 °C at sea level."), "not marked"),
    (cloze("Water boils at {{100 °C}} at sea level."), "not marked"),
    (cloze("Water boils at {{c1::100 °C}} at {{c1::sea level."), "not marked"),
    (cloze("{{c2::Water}} boils at 100 °C at sea level."), "numbered"),
    (cloze("{{c1::Water}} boils at {{c3::100 °C}} at sea level."), "numbered"),
    (cloze("{{c0::Water}} boils at 100 °C at sea level."), "numbered"),
    (cloze("{{c1::Water}} {{c2::boils}} at {{c3::100 °C}} at {{c4::sea level}}."), "numbered"),
    (cloze("{{c1::Water boils at 100 °C at sea level}}."), "nothing is left"),
    (cloze("Water boils at {{c1::90 °C}} at sea level."), "hidden words"),
    (cloze(hint="bell \x07"), "hint"),
    (basic("water", evidence=[{"sid": "p1", "quote": "x" * 4001}]), "quote is longer"),
]


@pytest.mark.parametrize(("card", "reason"), DROPPED, ids=[f"{reason}-{n}" for n, (_, reason) in enumerate(DROPPED)])
def test_invalid_card_is_dropped_with_its_reason(card: dict[str, Any], reason: str) -> None:
    found = dropped(card)

    assert found is not None
    assert reason in found


KEPT = [
    basic("water"),
    cloze(),
    cloze("{{c1::Water}} boils at {{c2::100 °C}} at {{c3::sea level}}."),
    cloze("{{c1::Water}} boils at {{c1::100 °C}} at sea level."),
    cloze("Water boils at {{c1::100 °C::how hot?}} at sea level.", hint="temperature"),
    cloze("Water boils at {{c1::100 ℃}} at sea level."),
    basic(
        "water",
        front="植物利用什么制造有机物？",
        back="光能。",
        evidence=[{"sid": "p2", "quote": "植物利用光能制造有机物"}],
    ),
    basic("water", front="Boiling point in °C?", back="100"),
    basic("water", front="Which element holds the title of a page?", back="<title>"),
    basic("water", front="What is a List<String>?", back="if a<b and c>d"),
    basic("water", back="<script src=//x.example "),
    cloze(hint='<iframe src="x">'),
    basic("water", evidence=[{"sid": "p1", "quote": "Water \u202eboils at 100 °C at sea level.\u202c"}]),
]


@pytest.mark.parametrize("card", KEPT)
def test_valid_card_is_kept(card: dict[str, Any]) -> None:
    assert dropped(card) is None


def test_card_of_another_type_than_requested_is_dropped() -> None:
    assert "not asked for" in str(dropped(cloze(), notes(types=("basic",))))


def test_unshowable_tag_is_dropped_without_its_card() -> None:
    card = basic(tags=["ok", " ok ", "<b>x</b>", "", "x" * 41, *[f"t{n}" for n in range(20)]])

    checked = check(notes(), {"cards": [card]}, "job-1")

    assert checked["cards"][0]["tags"] == ["ok", "<b>x</b>", "t0", "t1", "t2", "t3", "t4", "t5"]


def test_surplus_cards_are_cut_off_and_not_counted_as_dropped() -> None:
    checked = check(notes(max_cards=2), {"cards": GOOD}, "job-1")

    assert {card["front"] for card in checked["cards"]} == {"What is osmosis?", "What is diffusion?"}
    assert checked["dropped"] == []


def test_up_to_forty_percent_of_the_cards_may_be_invalid() -> None:
    bad = basic("water", front=" ")
    fewer = basic("water", back="bell \x07")

    assert len(check(notes(), {"cards": [*GOOD[:3], bad, bad]}, "job-1")["cards"]) == 3
    with pytest.raises(JobError) as caught:
        check(notes(), {"cards": [*GOOD[:3], bad, bad, fewer]}, "job-1")

    assert caught.value.code == "VALIDATION_OUTPUT_SEMANTICS"
    assert caught.value.faults == ("the front is blank", "the back has control characters")


def test_answer_without_a_valid_card_is_refused() -> None:
    with pytest.raises(JobError, match="VALIDATION_OUTPUT_SEMANTICS"):
        check(notes(), {"cards": [basic("water", front=" ")]}, "job-1")


def test_faults_quote_nothing_of_the_notes_or_the_answer() -> None:
    with pytest.raises(JobError) as caught:
        check(notes(), {"cards": [basic(front="canary", back="canary"), basic(back="canary \x07")]}, "job-1")

    assert "canary" not in f"{caught.value.internal}{caught.value.faults}"


def test_card_order_depends_on_the_job_and_the_input_is_not_changed() -> None:
    given, output = notes(), {"cards": copy.deepcopy(GOOD)}
    before = copy.deepcopy((given, output))

    orders = {tuple(card["front"] for card in check(given, output, f"job-{n}")["cards"]) for n in range(8)}

    assert len(orders) > 1
    assert (given, output) == before
    assert check(given, output, "job-1") == check(given, output, "job-1")


# -- bounded work ---------------------------------------------------------------------------------------------


def long_cards(number: int) -> dict[str, Any]:
    """Return cards with fronts of 1,000 characters, each with other words."""
    return {"cards": [basic("water", front=" ".join(f"w{n}x{m}" for m in range(200))[:1000]) for n in range(number)]}


def many_gaps(number: int) -> dict[str, Any]:
    gaps = "{{c1::100 °C}} {{c1::sea}} "
    return {"cards": [cloze(f"{n} water {gaps * 30}") for n in range(number)]}


def many_tags(number: int) -> dict[str, Any]:
    tags = [f"tag {n}" for n in range(number * 100)]
    return {"cards": [basic("water", tags=tags)]}


@pytest.mark.parametrize("answer_of", [long_cards, many_gaps])
def test_work_of_the_check_grows_linearly_with_the_cards(answer_of: Callable[[int], dict[str, Any]]) -> None:
    given = notes(max_cards=MAX_CARDS)
    answer_of_40, answer_of_20 = answer_of(40), answer_of(20)

    check(given, answer_of_20, "job-1")  # Fill the caches.

    twice = count_calls(lambda: check(given, answer_of_40, "job-1"))
    assert twice < 2.3 * count_calls(lambda: check(given, answer_of_20, "job-1"))


def test_work_of_the_check_does_not_depend_on_the_number_of_tags() -> None:
    few, many = many_tags(1), many_tags(50)

    check(notes(), few, "job-1")

    assert count_calls(lambda: check(notes(), many, "job-1")) < 1.1 * count_calls(lambda: check(notes(), few, "job-1"))


def test_check_stops_at_the_next_card_after_a_cancel() -> None:
    asked = []

    class Cancelled:
        def raise_if_cancelled(self) -> None:
            asked.append(1)
            if len(asked) == 3:
                raise JobError("CANCELLED")

    with pytest.raises(JobError, match="CANCELLED"):
        check(notes(), {"cards": GOOD}, "job-1", Cancelled())

    assert len(asked) == 3


def test_definition_has_the_documented_values() -> None:
    assert DEFINITION.job_type == "flashcard_generation"
    assert DEFINITION.queue.queue_name == "ai-background"
    assert DEFINITION.execution.timeout_ms == 120_000
    assert DEFINITION.execution.abort_strategy == "retry"
    assert DEFINITION.metadata.labels["zh"]
    assert DEFINITION.prompt is not None
