"""Is what an answer says in the learner's notes? Finding quotes, whatever their width, case, quotes and white
space.

Shared by all job types whose items carry `evidence [{sid, quote}]`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from aijobs.ai.output import BIDI_OVERRIDES

MIN_QUOTE = 4
"""Folded characters below which a quote proves nothing; an ideograph counts as two."""

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
    """Where a quote stands: `text[start:end]` of the segment, verbatim."""

    start: int
    end: int


def fold(text: str) -> str:
    """`text` as it is compared: compatibility forms, case, quotes, dashes and white space made alike."""
    return "".join(_fold_character(character) for character in text)


@lru_cache(maxsize=16_384)
def _fold_character(character: str) -> str:
    # One character at a time, so that each folded one can be led back to its place. Decomposed forms, since
    # composition would look at neighbours.
    if character in _INVISIBLE or character.isspace():
        return ""
    alike = unicodedata.normalize("NFKD", character.translate(_FOLDS)).casefold().translate(_FOLDS)
    return "".join(part for part in unicodedata.normalize("NFKD", alike) if not part.isspace())


class FoldedText:
    """A segment prepared for finding many quotes in it."""

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
        """The first place where `quote` stands, or None; also None for a quote too short to prove
        anything.
        """
        wanted = fold(quote)
        if len(wanted) + len(_IDEOGRAPH.findall(wanted)) < MIN_QUOTE:
            return None
        at = self._folded.find(wanted)
        if at < 0:
            return None
        end = self._whole[self._origins[at + len(wanted) - 1] + 1]
        return Place(self._origins[at], end)

    def slice(self, place: Place) -> str:
        """The verbatim text of a place."""
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
    """The segments of an input by their `sid`."""
    return {segment["sid"]: FoldedText(segment["text"]) for segment in segments}


def script_of(text: str) -> str | None:
    """`zh`, `en` (any Latin-like script), or None where there is too little text to tell.

    An ideograph weighs as much as a word: Chinese about ATP is Chinese, and English that names a Chinese word
    is English.
    """
    ideographs = len(_IDEOGRAPH.findall(text))
    words = len(_WORD.findall(text))
    if ideographs + words < 2:
        return None
    return "zh" if ideographs > words else "en"
