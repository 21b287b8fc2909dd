"""Rules for the items of all job types: what may be shown, what repeats, how many must remain."""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

from aijobs.errors import JobError
from aijobs.learning.grounding import fold

KEPT_SHARE = 0.6
"""Minimum part of the requested items that must pass the checks."""

T = TypeVar("T")

_LATIN_WORD = re.compile(r"[^\W_\u3400-\u9fff]+(?:[-'][^\W_\u3400-\u9fff]+)*")
_IDEOGRAPHS = re.compile(r"[\u3400-\u9fff]+")
_SAYS_NOTHING = re.compile(r"什么|哪些|哪|是|的|了|吗|指")
_STOP_WORDS = frozenset("a an the is are was were be of in on at to and or what who which does do did".split())
_SHORT, _ALIKE = 10, 0.9


def text_fault(text: str, limit: int) -> str | None:
    """Return what is wrong with a text that learners will read, or None: blank, too long, control characters.

    Text is text: `<title>` may be what a lesson is about. Whatever shows it escapes it.
    """
    if not text.strip():
        return "is blank"
    if len(text) > limit:
        return f"is longer than {limit} characters"
    if any(unicodedata.category(character) == "Cc" and character not in "\n\t" for character in text):
        return "has control characters"
    return None


class Questions:
    """The questions of the kept items, to find repetitions. Each text is read once, however many there are."""

    def __init__(self) -> None:
        self._kept: list[frozenset[str]] = []

    def add(self, text: str) -> bool:
        """Keep `text` and return True, or return False if it asks the same as a text that is kept."""
        features = _features(text)
        if any(_are_alike(features, other) for other in self._kept):
            return False
        self._kept.append(features)
        return True


def _are_alike(mine: frozenset[str], theirs: frozenset[str]) -> bool:
    if mine == theirs:
        return True
    if min(len(mine), len(theirs)) < max(_SHORT, _ALIKE * max(len(mine), len(theirs))):
        return False  # Sets of such different sizes share too little, whatever they hold.
    shared = len(mine & theirs)
    if shared < _ALIKE * (len(mine) + len(theirs) - shared):
        return False
    return not any(any(character.isdigit() for character in feature) for feature in mine ^ theirs)


def _features(text: str) -> frozenset[str]:
    words = {word for word in (fold(w) for w in _LATIN_WORD.findall(text)) if word not in _STOP_WORDS}
    pairs = {
        run[i : i + 2] for run in _IDEOGRAPHS.findall(_SAYS_NOTHING.sub("", text)) for i in range(max(1, len(run) - 1))
    }
    return frozenset(words | pairs)


def shuffled(items: Sequence[T], job_id: str) -> list[T]:
    """Return `items` in a stable order that reveals nothing: by the hash of job and index."""

    def place(index: int) -> bytes:
        return hashlib.sha256(f"{job_id}:{index}".encode()).digest()

    return [items[index] for index in sorted(range(len(items)), key=place)]


def require_enough(kept: int, asked_for: int, reasons: Sequence[str]) -> None:
    """Raise VALIDATION_OUTPUT_SEMANTICS, naming the commonest reasons, unless enough items remain."""
    if kept >= max(1, math.ceil(KEPT_SHARE * asked_for)):
        return
    by_count = sorted(set(reasons), key=lambda reason: (-reasons.count(reason), reason))
    raise JobError(
        "VALIDATION_OUTPUT_SEMANTICS",
        f"{kept} of {asked_for} items passed the checks: {'; '.join(by_count[:5]) or 'there were none'}",
        faults=by_count or ["the answer had no items"],
    )
