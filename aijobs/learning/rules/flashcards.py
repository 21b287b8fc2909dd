"""Make cards from facts: definitions first, then other answers, then gaps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from aijobs.ai.provider import CancellationToken
from aijobs.errors import JobError
from aijobs.learning.items import Questions, text_fault
from aijobs.learning.rules.facts import ACRONYM, DEFINITION, NAME, NUMBER, QUESTION, TERM, Fact
from aijobs.learning.rules.reader import NotesReader, Reading

GAPS_A_TERM = 2
"""Maximum gaps for one term."""

_STATED = (DEFINITION, QUESTION, ACRONYM)
_HIDDEN = (TERM, ACRONYM, NUMBER, NAME)
_KINDS = (DEFINITION, QUESTION, ACRONYM, TERM, NUMBER, NAME)
_TAGS = {
    "en": dict(zip(_KINDS, ("definition", "fact", "abbreviation", "term", "number", "name"), strict=True)),
    "zh": dict(zip(_KINDS, ("定义", "事实", "缩写", "术语", "数字", "名称"), strict=True)),
}
_DIFFICULTY = {
    DEFINITION: "medium",
    QUESTION: "medium",
    ACRONYM: "easy",
    TERM: "medium",
    NUMBER: "hard",
    NAME: "hard",
}


def make_flashcards(reader: NotesReader, notes: Mapping[str, Any], token: CancellationToken) -> dict[str, Any]:
    """Return the answer of `flashcard_generation`: at most `options.max_cards` cards, each with its quote.

    `JobError(VALIDATION_NOTHING_TO_EXTRACT)` if the rules find nothing, and the token's errors.
    """
    options = notes["options"]
    wanted = {"basic", "cloze"} & set(options["card_types"])
    questions = {"basic": Questions(), "cloze": Questions()}
    cards: list[dict[str, Any]] = []
    for card in _candidates(reader.read(notes, token)):
        if len(cards) >= options["max_cards"]:
            break
        kind = card["card_type"]
        if kind in wanted and _is_fit(card) and questions[kind].add(card["front" if kind == "basic" else "text"]):
            cards.append(card)
    if not cards:
        raise JobError("VALIDATION_NOTHING_TO_EXTRACT", "the rules found no definition, term, number or name")
    return {"cards": cards}


def _candidates(reading: Reading) -> Iterator[dict[str, Any]]:
    for kind in _STATED:
        yield from (_basic(fact) for fact in reading.statements if fact.kind == kind)
    hidden: Counter[str] = Counter()
    used: set[tuple[str, int]] = set()
    for kind in _HIDDEN:
        for fact in reading.gaps:
            place = (fact.sentence.sid, fact.sentence.start)
            if fact.kind == kind and place not in used and hidden[fact.term] < GAPS_A_TERM:
                used.add(place)
                hidden[fact.term] += 1
                yield _cloze(fact)


def _basic(fact: Fact) -> dict[str, Any]:
    return {"card_type": "basic", "front": fact.question, "back": fact.answer, **_shared(fact)}


def _cloze(fact: Fact) -> dict[str, Any]:
    """Return a cloze card. Every occurrence of the hidden words is hidden, so that the sentence doesn't show its own
    answer.
    """
    around = r"(?<![\w-])", r"(?![\w-])"
    before, after = around if fact.lang == "en" else ("", "")
    pattern = re.compile(before + re.escape(fact.gap) + after, re.IGNORECASE if fact.kind == TERM else 0)
    text = pattern.sub(lambda match: f"{{{{c1::{match.group()}}}}}", fact.question)
    return {"card_type": "cloze", "text": text, "hint": _TAGS[fact.lang][fact.kind], **_shared(fact)}


def _shared(fact: Fact) -> dict[str, Any]:
    sentence = fact.sentence
    tags = [_TAGS[fact.lang][fact.kind]]
    if sentence.heading and len(sentence.heading) <= 40:
        tags.append(sentence.heading)
    evidence = {"sid": sentence.sid, "quote": sentence.raw, "start": sentence.start, "end": sentence.end}
    return {"tags": tags, "difficulty": _DIFFICULTY[fact.kind], "evidence": [evidence]}


def _is_fit(card: Mapping[str, Any]) -> bool:
    sides = [card["front"], card["back"]] if card["card_type"] == "basic" else [card["text"]]
    return all(text_fault(side, 1000) is None for side in sides) and len(card["evidence"][0]["quote"]) <= 1000
