"""Messages about values that break a schema don't contain the value."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aijobs.validation import ANOTHER_NAME, find_schema_faults, plain_location, plain_path

CANARY = "CANARY osmosis"


class Basic(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["basic"]
    front: str = Field(max_length=5, pattern="^[a-z]+$")


class Cloze(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["cloze"]
    level: Literal["easy", "hard"] = "easy"
    count: int = Field(3, le=9)


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    cards: list[Annotated[Basic | Cloze, Field(discriminator="kind")]] = Field(max_length=3)
    counts: dict[str, int] = Field(default_factory=dict)


def faults(answer: Any) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as refused:
        Answer.model_validate(answer)
    return [(plain_location(place), fault) for place, fault in find_schema_faults(refused.value)]


@pytest.mark.parametrize(
    "answer",
    [
        CANARY,
        {"cards": CANARY},
        {"cards": [CANARY]},
        {"cards": [{"kind": CANARY}]},
        {"cards": [{"kind": [CANARY]}]},
        {"cards": [{CANARY: CANARY}]},
        {"cards": [{"kind": "basic", "front": CANARY}]},
        {"cards": [{"kind": "basic", "front": {CANARY: CANARY}}]},
        {"cards": [{"kind": "basic", "front": "a", CANARY: 1}]},
        {"cards": [{"kind": "cloze", "level": CANARY, "count": CANARY}]},
        {"cards": [], CANARY: CANARY},
        {"cards": [], "counts": {CANARY: CANARY}},
    ],
)
def test_schema_error_does_not_quote_the_value(answer: Any) -> None:
    found = faults(answer)
    assert found
    assert "CANARY" not in str(found)


def test_schema_error_names_place_and_rule() -> None:
    assert faults({"cards": [{"kind": CANARY}]}) == [("cards.0", "'kind' is none of 'basic', 'cloze'")]
    assert faults({"cards": [{"kind": "cloze", "level": "x"}]}) == [
        ("cards.0.cloze.level", "Input should be 'easy' or 'hard'")
    ]
    assert faults({"cards": [], "anotherField": 1}) == [("anotherField", "Extra inputs are not permitted")]
    assert faults({"cards": [], CANARY: 1}) == [(ANOTHER_NAME, "Extra inputs are not permitted")]


@pytest.mark.parametrize("path", ["", "cards", "cards[0].front", "a_b.cDe[12][3].f", "[0]"])
def test_path_of_schema_fields_is_kept(path: str) -> None:
    assert plain_path(path) == path


@pytest.mark.parametrize(
    "path", [CANARY, "CANARY", "a.sk-1", "a b", "a..b", "key1", "ключ", "a" * 201, "a.CANARY[0]", "a\n"]
)
def test_path_with_a_name_from_the_value_is_hidden(path: str) -> None:
    assert plain_path(path) == ANOTHER_NAME
