"""Find an answer's quotes in the learner's notes, whatever their width, case, quotation marks and white space.

Shared by all job types whose items have `evidence [{sid, quote}]`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from aijobs.ai.output import BIDI_OVERRIDES

MIN_QUOTE = 4
"""Minimum length of a quote in folded characters; an ideograph counts as two."""

_SINGLE_QUOTES = "‘’‚‛′´`"
_DOUBLE_QUOTES = "“”„‟″«»「」『』〝〞"
_DASHES = "‐‑‒–—―−"
_FOLDS = str.maketrans(
    _SINGLE_QUOTES + _DOUBLE_QUOTES + _DASHES,
    "'" * len(_SINGLE_QUOTES) + '"' * len(_DOUBLE_QUOTES) + "-" * len(_DASHES),
)
_INVISIBLE = frozenset("\u00ad\u200b\u200c\u200d\u2060\ufeff" + BIDI_OVERRIDES)
_IDEOGRAPH = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]")
_WORD = re.compile(r"[^\W\d_\u3400-\u9fff]{2,}")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a quote: `text[start:end]` of the segment, verbatim."""

    start: int
    end: int


def fold(text: str) -> str:
    """Return the text for comparison, with compatibility forms, case, quotation marks, dashes and white space made
    equal.
    """
    return "".join(_fold_character(character) for character in text)


@lru_cache(maxsize=16_384)
def _fold_character(character: str) -> str:
    # One character at a time, so that each folded one has its place. Decomposed forms, because composition would look
    # at neighbours.
    if character in _INVISIBLE or character.isspace():
        return ""
    alike = unicodedata.normalize("NFKD", character.translate(_FOLDS)).casefold().translate(_FOLDS)
    return "".join(part for part in unicodedata.normalize("NFKD", alike) if not part.isspace())


class FoldedText:
    """A segment, prepared for the search for many quotes."""

    def __init__(self, text: str) -> None:
        self.text = text
        folded: list[str] = []
        origins: list[int] = []
        self._whole = _ends_of_characters(text)
        for index, character in enumerate(text):
            for part in _fold_character(character):
                folded.append(part)
                origins.append(index)
        self._folded = "".join(folded)
        self._origins = origins

    def locate(self, quote: str) -> Place | None:
        """Return the first place of `quote`; None if there is none, or if the quote is too short."""
        wanted = fold(quote)
        if len(wanted) + len(_IDEOGRAPH.findall(wanted)) < MIN_QUOTE:
            return None
        at = self._folded.find(wanted)
        if at < 0:
            return None
        end = self._whole[self._origins[at + len(wanted) - 1] + 1]
        return Place(self._origins[at], end)

    def slice(self, place: Place) -> str:
        """Return the verbatim text of a place."""
        return self.text[place.start : place.end]


def _ends_of_characters(text: str) -> list[int]:
    """Return for each index, and for the end, where the combining marks that begin there end.

    Computed once: a search for each quote would walk along the same marks again and again.
    """
    ends = list(range(len(text) + 1))
    for index in range(len(text) - 1, -1, -1):
        if unicodedata.combining(text[index]):
            ends[index] = ends[index + 1]
    return ends


def fold_segments(segments: Sequence[Mapping[str, str]]) -> dict[str, FoldedText]:
    """Return the segments of an input by their `sid`."""
    return {segment["sid"]: FoldedText(segment["text"]) for segment in segments}


def script_of(text: str) -> str | None:
    """Return `zh`, `en` (any Latin-like script), or None if there is too little text.

    An ideograph counts as much as a word: Chinese about ATP is Chinese, and English that names a Chinese word is
    English.
    """
    ideographs = len(_IDEOGRAPH.findall(text))
    words = len(_WORD.findall(text))
    if ideographs + words < 2:
        return None
    return "zh" if ideographs > words else "en"
