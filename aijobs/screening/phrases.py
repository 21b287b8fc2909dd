"""Find phrases in a text, whatever its width, case, marks and invisible characters, in linear time.

A phrase is written like `how to (make|build) ~4 pipe bomb`: words as they are; `(a|b)` one of these, where an empty
alternative, `(|a)`, is optional; `~4` up to four words in between (characters in Chinese); `word*` any ending. Parts
stand next to each other, in one sentence.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, product

import ahocorasick

MAX_GAP = 12
MAX_OPTIONAL = 5
MAX_LITERALS = 800
_REMEMBERED = 4
"""The last matches of a part from which a phrase may continue. More would only find the same phrase again."""

_IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_IDEOGRAPH = re.compile(f"[{_IDEOGRAPHS}]")
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")
_SEPARATORS = re.compile(r"[\W_]+")
_SENTENCE_END = re.compile(r"[!?。]|\.\s|\n[^\S\n]*\n")
_CLAUSE = re.compile(r"[,:、()\[\]\"“”《》;]")
_DROPPED = frozenset({"Mn", "Me", "Cf"})
_APOSTROPHES = frozenset("'’‘ʼ`´")
_TOKEN = re.compile(r"\((?P<either>[^()]*)\)|~(?P<gap>\d+)|(?P<word>[^\s()|~]+)|(?P<odd>\S)")

Alike = Mapping[int, str]
"""Characters that count as others, by code point, for `str.translate`."""


def fold(text: str, alike: Alike) -> str:
    """Return the text for comparison: words with one space between, ideographs with none, a line break at the end of a
    sentence.

    Compatibility forms, case, combining marks, invisible characters and apostrophes make no difference.
    """
    # Remove marks first: normalization sorts a run of them, in quadratic time.
    plain = unicodedata.normalize("NFKD", _without_marks(text)).casefold()
    plain = unicodedata.normalize("NFKC", _without_marks(plain)).translate(alike)
    return _SEPARATORS.sub(_separator, plain).strip(" ,\n")


def _without_marks(text: str) -> str:
    if text.isascii():
        return text.replace("'", "").replace("`", "")
    return "".join(
        c for c in text if c not in _APOSTROPHES and (c.isascii() or unicodedata.category(c) not in _DROPPED)
    )


def _separator(run: re.Match[str]) -> str:
    text, start, end = run.string, run.start(), run.end()
    if _SENTENCE_END.search(run[0]):
        return "\n"
    if _is_ideograph(text[start - 1 : start]) or _is_ideograph(text[end : end + 1]):
        return "," if _CLAUSE.search(run[0]) else ""
    return " "


def _is_ideograph(character: str) -> bool:
    return _IDEOGRAPH.match(character) is not None


def _joins_words(character: str) -> bool:
    """Return whether a word continues across this character. An ideograph is a word of its own."""
    return character.isalnum() and not _is_ideograph(character)


@dataclass(frozen=True, slots=True)
class Literal:
    """Folded text. `open_end`: the word may continue."""

    text: str
    open_end: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One of these literals, at most `gap` words after the part before."""

    literals: tuple[Literal, ...]
    gap: int


_Choice = tuple[tuple[str, ...], int]
"""The alternatives of a place ("" is nothing), and how many words may come before it."""
Variant = tuple[Part, ...]
"""One variant of a phrase."""
Owner = tuple[str, str]
"""The owner of a phrase: a kind and a name."""


def parse_phrase(source: object, alike: Alike) -> tuple[Variant, ...]:
    """Return the variants of a phrase, each without optional parts. `ValueError` says what is wrong with it."""
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{source!r} is no phrase: write a text, in quotes where YAML would read something else")
    parts: list[_Choice] = []
    words: list[str] = []
    gap = 0

    def flush() -> None:
        nonlocal gap
        if words:
            parts.append(((" ".join(words),), gap))
            words.clear()
            gap = 0

    for token in _TOKEN.finditer(source):
        if token["odd"]:
            raise ValueError(f"{source!r} has a {token['odd']!r} that belongs to nothing")
        if token["word"]:
            words.append(token["word"])
            if token["word"].endswith("*"):
                flush()
            continue
        flush()
        if token["gap"]:
            gap = int(token["gap"])
            if not parts or not 1 <= gap <= MAX_GAP:
                raise ValueError(f"{source!r}: a gap is ~1 to ~{MAX_GAP} and stands between two parts")
        else:
            parts.append((tuple(word.strip() for word in token["either"].split("|")), gap))
            gap = 0
    flush()
    if gap:
        raise ValueError(f"{source!r} ends in a gap")
    return _variants(source, parts, alike)


def _variants(source: str, parts: list[_Choice], alike: Alike) -> tuple[Variant, ...]:
    parts = _joined(parts)
    optional = sum("" in either for either, _ in parts)
    if optional > MAX_OPTIONAL or optional == len(parts):
        raise ValueError(f"{source!r} has more than {MAX_OPTIONAL} parts that may be missing, or no other")
    choices: list[tuple[Part | None, ...]] = []
    for either, gap in parts:
        literals = tuple(_literal(source, word, alike) for word in either if word)
        if not literals:
            raise ValueError(f"{source!r} has a part with nothing in it")
        choices.append((Part(literals, gap), None) if "" in either else (Part(literals, gap),))
    said = (tuple(part for part in chosen if part is not None) for chosen in product(*choices))
    return tuple((Part(variant[0].literals, 0), *variant[1:]) for variant in said)


def _joined(parts: list[_Choice]) -> list[_Choice]:
    """Join neighbours if that makes few literals: a short common word such as `i` is then searched together with the
    next one.
    """
    joined = parts[:1]
    for either, gap in parts[1:]:
        before, first_gap = joined[-1]
        if gap or len(before) * len(either) > MAX_LITERALS or any(word.endswith("*") for word in before):
            joined.append((either, gap))
        else:
            both = dict.fromkeys(f"{left} {right}".strip() for left in before for right in either)
            joined[-1] = (tuple(both), first_gap)
    return joined


def _literal(source: str, word: str, alike: Alike) -> Literal:
    text = fold(word.removesuffix("*"), alike)
    if "*" in word[:-1] or not text or not _WORD.search(text) or "\n" in text or "," in text:
        raise ValueError(f"{source!r}: {word!r} is not made of words")
    return Literal(text, word.endswith("*"))


@dataclass(frozen=True, slots=True)
class Span:
    """The place of a phrase, counted in words (and ideographs) of the text."""

    start: int
    end: int


class Spans:
    """Places of one kind, to test whether any of them touches a part of the text."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        ordered = sorted(spans, key=lambda span: span.start)
        self._starts = [span.start for span in ordered]
        self._furthest = list(accumulate((span.end for span in ordered), max))

    def touch(self, start: int, end: int) -> bool:
        """Return whether one begins before `end` and ends after `start`."""
        before = bisect_left(self._starts, end)
        return before > 0 and self._furthest[before - 1] > start


@dataclass(frozen=True, slots=True)
class _Use:
    owner: Owner
    phrase: int
    part: int
    gap: int
    is_last: bool
    open_end: bool


class PhraseMatcher:
    """Finds the phrases of many owners in one pass over a text."""

    def __init__(self, phrases: Iterable[tuple[Owner, Variant]], alike: Alike) -> None:
        self._alike = alike
        self._automaton = ahocorasick.Automaton()
        uses: dict[str, list[_Use]] = {}
        for number, (owner, variant) in enumerate(phrases):
            for index, part in enumerate(variant):
                for literal in part.literals:
                    last = index == len(variant) - 1
                    use = _Use(owner, number, index, part.gap, last, literal.open_end)
                    uses.setdefault(literal.text, []).append(use)
        for text, used in uses.items():
            self._automaton.add_word(text, (len(text), tuple(used)))
        if uses:
            self._automaton.make_automaton()

    def find(self, text: str) -> dict[Owner, list[Span]]:
        """Return the places of each owner's phrases; owners without any are left out.

        Each match of a part is compared with a limited number of matches before it.
        """
        found: dict[Owner, list[Span]] = {}
        if not len(self._automaton):
            return found
        folded = fold(text, self._alike)
        words, breaks = _counts(folded)
        reached: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        for start, end, use in self._places(folded):
            for begin in _beginnings(use, start, reached, words, breaks):
                if use.is_last:
                    found.setdefault(use.owner, []).append(Span(words[begin], max(words[end], words[begin] + 1)))
                else:
                    places = reached.setdefault((use.phrase, use.part), deque(maxlen=_REMEMBERED))
                    places.appendleft((begin, end))
                break
        return found

    def _places(self, folded: str) -> Iterator[tuple[int, int, _Use]]:
        """Yield (start, end, use) of each literal that stands in the text as whole words."""
        for last, (length, uses) in self._automaton.iter(folded):
            start, end = last - length + 1, last + 1
            if start and _joins_words(folded[start]) and _joins_words(folded[start - 1]):
                continue
            cut = end < len(folded) and _joins_words(folded[last]) and _joins_words(folded[end])
            for use in uses:
                if use.open_end or not cut:
                    yield start, end, use


def _beginnings(
    use: _Use,
    start: int,
    reached: Mapping[tuple[int, int], deque[tuple[int, int]]],
    words: list[int],
    breaks: list[int],
) -> Iterator[int]:
    """Yield the starts of phrases that begin, or continue, with this use at `start`; the nearest first."""
    if use.part == 0:
        yield start
        return
    for begin, end in reached.get((use.phrase, use.part - 1), ()):
        if end <= start and words[start] - words[end] <= use.gap and breaks[start] == breaks[end]:
            yield begin


def _counts(folded: str) -> tuple[list[int], list[int]]:
    """Return, for each place in the text, how many words begin before it, and how many sentences end before it."""
    begins = [0] * (len(folded) + 1)
    for word in _WORD.finditer(folded):
        begins[word.start() + 1] = 1
    ends = [0, *(character == "\n" for character in folded)]
    return list(accumulate(begins)), list(accumulate(ends))
