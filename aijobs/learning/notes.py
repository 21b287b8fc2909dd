"""Learner's notes as job input: their schema, and the conversion from plain text."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from aijobs.errors import AijobsError
from aijobs.learning.grounding import fold, script_of

MAX_SEGMENTS = 200
MAX_CHARACTERS = 60_000
MAX_TITLE = 300
MAX_SOURCE_ID = 255
_PARAGRAPH_BREAK = re.compile(r"(?>\r\n|[\n\r\f\u2029])(?:[^\S\n\r\f]*(?>\r\n|[\n\r\f\u2029]))+")


class NotesError(AijobsError):
    """The text can't become notes. The message is one line for the person who gave it."""


def _no_nul(text: str) -> str:
    if "\x00" in text:
        raise ValueError("must not contain a NUL character")
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


def _one_line(text: str) -> str:
    if any(ord(character) < 32 or ord(character) == 127 for character in text) or text != text.strip():
        raise ValueError("must be one line, with no space at either end and no control character")
    return text


Text = Annotated[str, AfterValidator(_no_nul)]
Line = Annotated[str, AfterValidator(_one_line)]


class Source(BaseModel):
    """The origin of the notes, in the learning app's words."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Line = Field(min_length=1, max_length=MAX_SOURCE_ID)
    title: Line = Field(min_length=1, max_length=MAX_TITLE)


class Segment(BaseModel):
    """A piece of the notes, with an id for evidence."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sid: str = Field(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")
    text: Annotated[Text, AfterValidator(_not_blank)] = Field(min_length=1, max_length=MAX_CHARACTERS)


class NotesInput(BaseModel):
    """The input that all job types over notes share; each adds its `options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lang: Literal["en", "zh"]
    source: Source
    segments: list[Segment] = Field(min_length=1, max_length=MAX_SEGMENTS)

    @field_validator("segments")
    @classmethod
    def _fits(cls, segments: list[Segment]) -> list[Segment]:
        if len({segment.sid for segment in segments}) < len(segments):
            raise ValueError("each sid may stand once")
        total = sum(len(segment.text) for segment in segments)
        if total > MAX_CHARACTERS:
            raise ValueError(f"all texts together have {total} characters; {MAX_CHARACTERS} are allowed")
        return segments


def notes_from_text(text: str, title: str, source_id: str) -> dict[str, Any]:
    """Return `lang`, `source` and `segments` of a job's input for a plain text: its paragraphs, as `p1`, `p2`, ….

    A heading stays with the paragraph below it, and beyond `MAX_SEGMENTS` neighbours are joined. `NotesError` for a
    text that is empty, too long, or holds NUL characters.
    """
    text = text.lstrip("\ufeff")
    if "\x00" in text:
        raise NotesError("the text has NUL characters in it; is it a text file?")
    if not fold(text):
        raise NotesError("the text is empty")
    if len(text) > MAX_CHARACTERS:
        raise NotesError(f"the text has {len(text)} characters; at most {MAX_CHARACTERS} are allowed")
    paragraphs = _together(_paragraphs(text))
    return {
        "lang": script_of(text) or "en",
        "source": {"id": _shown(source_id, MAX_SOURCE_ID), "title": _shown(title, MAX_TITLE)},
        "segments": [{"sid": f"p{number}", "text": paragraph} for number, paragraph in enumerate(paragraphs, 1)],
    }


def _paragraphs(text: str) -> list[str]:
    """Return the parts of `text` between blank lines, verbatim. A short first line is joined with the part that it
    heads.
    """
    bounds, begin = [], 0
    for blank in _PARAGRAPH_BREAK.finditer(text):
        bounds.append((begin, blank.start()))
        begin = blank.end()
    bounds.append((begin, len(text)))
    found: list[str] = []
    heading: int | None = None
    for start, end in bounds:
        piece = text[start:end].strip()
        if not piece:
            continue
        if found and _is_heading(piece):
            heading = start if heading is None else heading
            continue
        found.append(text[start if heading is None else heading : end].strip())
        heading = None
    if heading is not None:
        found.append(text[heading:].strip())
    return found


def _is_heading(piece: str) -> bool:
    short = len(piece) <= (24 if script_of(piece) == "zh" else 60)
    return (
        short
        and not re.search(r"[\n\r]", piece)
        and piece[-1] not in ".!?。！？;；,，"
        and "：" not in piece
        and ":" not in piece
    )


def _together(paragraphs: list[str]) -> list[str]:
    if len(paragraphs) <= MAX_SEGMENTS:
        return paragraphs
    size = -(-len(paragraphs) // MAX_SEGMENTS)
    return ["\n\n".join(paragraphs[i : i + size]) for i in range(0, len(paragraphs), size)]


def _shown(text: str, limit: int) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line[:limit].strip() or "notes"
