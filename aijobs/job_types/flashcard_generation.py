"""Flashcards from a learner's notes.

In: the notes in segments, their language, and how many cards of which types. Out: `basic` cards (front, back)
and `cloze` cards (a text with `{{c1::…}}` gaps), each with quotes that stand in the notes; what failed a
check is listed under `dropped`. Leaves: one Flashcard row a card.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.db.clock import DatabaseClock
from aijobs.definitions import definition as d
from aijobs.definitions.projector import Artifact, ProjectedJob, ProjectionResult
from aijobs.jobs.snapshots import read_content
from aijobs.learning.grounding import FoldedText, fold, fold_segments, script_of
from aijobs.learning.items import Questions, require_enough, shuffled, text_fault
from aijobs.learning.models import FLASHCARD_GENERATION, Flashcard
from aijobs.learning.notes import NotesInput

ARTIFACT_TYPE = "Flashcard"
MAX_CARDS = 50
MAX_SIDE, MAX_QUOTE, MAX_TAG, MAX_TAGS, MAX_EVIDENCE = 1000, 1000, 40, 8, 5
SPACED_OUT = 4
"""A text may be this many times as long as its limit before its white space is folded. What is longer is not read."""
TAGS_READ = 4 * MAX_TAGS

_GAP = re.compile(r"\{\{c(?P<number>\d+)::(?P<answer>[^{}]+?)(?:::(?P<hint>[^{}:]+))?\}\}")


class Options(BaseModel):
    """How many cards at most, and of which types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_cards: int = Field(20, ge=1, le=MAX_CARDS)
    card_types: list[Literal["basic", "cloze"]] = Field(["basic", "cloze"], min_length=1, max_length=2)


class Input(NotesInput):
    """Notes, and what to make of them."""

    options: Options = Field(default_factory=Options)


class Evidence(BaseModel):
    """A quote from the segment `sid`. The offsets are ours: whatever an answer says there is replaced."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sid: str
    quote: str
    start: int | None = None
    end: int | None = None


class _Card(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tags: list[str] = Field(default_factory=list)
    difficulty: Literal["easy", "medium", "hard"] = "medium"
    evidence: list[Evidence] = Field(min_length=1, max_length=MAX_EVIDENCE)


class BasicCard(_Card):
    """A question and its answer."""

    card_type: Literal["basic"]
    front: str
    back: str


class ClozeCard(_Card):
    """A sentence with one to three gaps."""

    card_type: Literal["cloze"]
    text: str
    hint: str | None = None


class Dropped(BaseModel):
    """A card that failed a check: its place in the answer, and why."""

    model_config = ConfigDict(extra="forbid", strict=True)

    index: int
    reason: str


class Output(BaseModel):
    """The cards. What one card says wrong drops that card alone, so texts have their limits in `check`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cards: list[Annotated[BasicCard | ClozeCard, Field(discriminator="card_type")]] = Field(
        min_length=1, max_length=4 * MAX_CARDS
    )
    dropped: list[Dropped] = Field(default_factory=list)


def check(
    notes: Mapping[str, Any], output: Mapping[str, Any], job_id: str, token: d.CheckContext | None = None
) -> dict[str, Any]:
    """The output to keep: cards that pass every check, at most as many as asked for, in the job's own order.

    Asked for is what the answer offers, up to `max_cards`: that is an upper limit, and short notes hold few
    cards. Raises `JobError(VALIDATION_OUTPUT_SEMANTICS)` unless one card and 60 % of those asked for remain, and
    what `token` raises once the attempt must stop.
    """
    limit = notes["options"]["max_cards"]
    segments = fold_segments(notes["segments"])
    questions = {"basic": Questions(), "cloze": Questions()}
    kept: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    for index, card in enumerate(output["cards"]):
        if token is not None:
            token.raise_if_cancelled()
        grounded, reason = _ground(card, segments)
        reason = reason or next(_faults(grounded, notes), None)
        if reason is None and len(kept) < limit and not questions[card["card_type"]].add(_question(card)):
            reason = "it asks the same as another card"
        if reason is not None:
            dropped.append({"index": index, "reason": reason})
        elif len(kept) < limit:
            kept.append(grounded)
    require_enough(len(kept), min(limit, len(output["cards"])), [drop["reason"] for drop in dropped])
    return {"cards": shuffled(kept, job_id), "dropped": dropped}


def _ground(card: Mapping[str, Any], segments: Mapping[str, FoldedText]) -> tuple[dict[str, Any], str | None]:
    """The card with its quotes as they stand in the notes, and what is wrong with them, if anything."""
    found = []
    for evidence in card["evidence"]:
        if len(evidence["quote"]) > SPACED_OUT * MAX_QUOTE:
            return dict(card), f"a quote is longer than {MAX_QUOTE} characters"
        segment = segments.get(evidence["sid"])
        place = segment.locate(evidence["quote"]) if segment is not None else None
        if segment is None or place is None:
            return dict(card), "a quote does not stand in the segment that it names"
        if place.end - place.start > MAX_QUOTE:
            return dict(card), f"a quote is longer than {MAX_QUOTE} characters"
        found.append({"sid": evidence["sid"], "quote": segment.slice(place), "start": place.start, "end": place.end})
    return {**card, "evidence": found, "tags": _tags(card)}, None


def _tags(card: Mapping[str, Any]) -> list[str]:
    """Tags are decoration: one that can't be shown is left out, and the card stays."""
    read = (tag for tag in islice(card.get("tags", ()), TAGS_READ) if len(tag) <= SPACED_OUT * MAX_TAG)
    lines = (" ".join(tag.split()) for tag in read)
    return list(dict.fromkeys(tag for tag in lines if text_fault(tag, MAX_TAG) is None))[:MAX_TAGS]


def _faults(card: Mapping[str, Any], notes: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a grounded card, worst first."""
    if card["card_type"] not in notes["options"]["card_types"]:
        yield f"a {card['card_type']} card was not asked for"
    for name in ("front", "back") if card["card_type"] == "basic" else ("text",):
        if (fault := text_fault(card[name], MAX_SIDE)) is not None:
            yield f"the {name} {fault}"
    if card.get("hint") is not None and (fault := text_fault(card["hint"], MAX_SIDE)) is not None:
        yield f"the hint {fault}"
    yield from _basic_faults(card) if card["card_type"] == "basic" else _cloze_faults(card)
    if not _in_language(card, notes["lang"]):
        yield "it is not in the language of the notes"


def _basic_faults(card: Mapping[str, Any]) -> Iterator[str]:
    if fold(card["front"]).strip("?？") == fold(card["back"]).strip(".。"):
        yield "front and back say the same"
    if "{{" in card["front"] + card["back"]:
        yield "a basic card has gap marks"


def _cloze_faults(card: Mapping[str, Any]) -> Iterator[str]:
    gaps = list(_GAP.finditer(card["text"]))
    rest = _GAP.sub("", card["text"])
    numbers = sorted({int(gap["number"]) for gap in gaps})
    if not gaps or "{{" in rest or "}}" in rest:
        yield "a gap is not marked like {{c1::words}}"
    elif numbers != list(range(1, len(numbers) + 1)) or len(numbers) > 3:
        yield "gaps must be numbered 1 to 3 without one left out"
    elif not any(character.isalnum() for character in rest):
        yield "nothing is left around the gap"
    elif not _stand_in({gap["answer"] for gap in gaps}, card["evidence"]):
        yield "hidden words do not stand in the quote"


def _stand_in(answers: Set[str], evidence: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each hidden text stands in one of the quotes."""
    quotes = [fold(one["quote"]) for one in evidence]
    return all(any(answer in quote for quote in quotes) for answer in map(fold, answers))


def _in_language(card: Mapping[str, Any], lang: str) -> bool:
    """Whether a card is in the notes' language, or in that of its own quote, since notes may mix two."""
    if card["card_type"] == "basic":
        spoken = script_of(f"{card['front']} {card['back']}")
    else:
        spoken = script_of(_GAP.sub(lambda gap: gap["answer"], card["text"]))
    return spoken in (None, lang, *(script_of(evidence["quote"]) for evidence in card["evidence"]))


def _question(card: Mapping[str, Any]) -> str:
    return str(card["front"] if card["card_type"] == "basic" else card["text"])


class FlashcardProjector:
    """One Flashcard row a card, in the job's own order."""

    key = "flashcard"

    def project(self, session: Session, job: ProjectedJob, validated_output: Mapping[str, Any]) -> ProjectionResult:
        """Write the cards; those that are there already where the job was projected before."""
        cards = self._cards_of(session, job.id) or self._write(session, job, validated_output["cards"])
        return ProjectionResult([Artifact(ARTIFACT_TYPE, card.id, card.ordinal) for card in cards])

    def _cards_of(self, session: Session, job_id: str) -> Sequence[Flashcard]:
        return (
            session.execute(select(Flashcard).where(Flashcard.job_id == job_id).order_by(Flashcard.ordinal))
            .scalars()
            .all()
        )

    def _write(self, session: Session, job: ProjectedJob, cards: Sequence[Mapping[str, Any]]) -> Sequence[Flashcard]:
        notes = read_content(session, job.id) or {}
        source = notes.get("source", {"id": job.target_id, "title": ""})
        now = DatabaseClock().now()
        rows = [
            Flashcard(
                user_id=job.user_id,
                job_id=job.id,
                ordinal=ordinal,
                card_type=card["card_type"],
                front=card.get("front"),
                back=card.get("back"),
                text=card.get("text"),
                hint=card.get("hint"),
                tags=card["tags"],
                difficulty=card["difficulty"],
                evidence=card["evidence"],
                lang=notes.get("lang", "en"),
                source_id=source["id"],
                source_title=source["title"],
                created_at=now,
            )
            for ordinal, card in enumerate(cards)
        ]
        session.add_all(rows)
        session.flush()
        return rows


PROJECTOR = FlashcardProjector()

DEFINITION = d.JobDefinition(
    job_type=FLASHCARD_GENERATION,
    metadata=d.Metadata(
        label="Flashcards",
        description="Makes flashcards from a learner's notes, each with the quote that it comes from.",
        domain="generation",
        version="1",
        labels={"zh": "记忆卡片"},
    ),
    queue=d.Queue("ai-background", 50),
    execution=d.Execution(
        timeout_ms=120_000,
        max_retries=2,
        retry_backoff=d.RetryBackoff(2000),
        cancellable=True,
        abort_strategy="retry",
    ),
    input=d.Input("1", Input),
    output=d.Output("1", Output, check, watches_token=True),
    credential=d.Credential(d.CREDENTIAL_MODES, d.PLATFORM_KEY),
    security=d.Security(content_safety_check=True, output_redaction=True),
    projector=PROJECTOR.key,
    prompt=d.PromptRef(FLASHCARD_GENERATION, "v1"),
)

_QUOTE = "Osmosis is the movement of water across a partially permeable membrane."

SAMPLE_INPUT: dict[str, Any] = {
    "lang": "en",
    "source": {"id": "note-1", "title": "Osmosis"},
    "segments": [{"sid": "p1", "text": f"{_QUOTE} Pure water boils at 100 °C at sea level."}],
    "options": {"max_cards": 2, "card_types": ["basic", "cloze"]},
}
SAMPLE_OUTPUT: dict[str, Any] = {
    "cards": [
        {
            "card_type": "basic",
            "front": "What is osmosis?",
            "back": "The movement of water across a partially permeable membrane.",
            "tags": ["definition"],
            "difficulty": "medium",
            "evidence": [{"sid": "p1", "quote": _QUOTE}],
        },
        {
            "card_type": "cloze",
            "text": "Pure water boils at {{c1::100 °C}} at sea level.",
            "hint": "temperature",
            "tags": [],
            "difficulty": "easy",
            "evidence": [{"sid": "p1", "quote": "Pure water boils at 100 °C at sea level."}],
        },
    ]
}
JUNK_OUTPUTS: tuple[dict[str, Any], ...] = (
    {},
    {"cards": []},
    {"cards": "none"},
    {"cards": [{"card_type": "basic", "front": "What is osmosis?", "evidence": [{"sid": "p1", "quote": _QUOTE}]}]},
    {"cards": [{"card_type": "poem", "text": "Water"}]},
    {"cards": [{**SAMPLE_OUTPUT["cards"][0], "evidence": []}]},
    {"cards": [{**SAMPLE_OUTPUT["cards"][0], "front": None}]},
    {**SAMPLE_OUTPUT, "note": "and one more thing"},
)
