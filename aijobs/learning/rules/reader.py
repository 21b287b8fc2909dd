"""Read facts from the segments of a job's input, in the language of each sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aijobs.ai.provider import CancellationToken
from aijobs.learning.grounding import fold, script_of
from aijobs.learning.rules.chinese import ChineseRules
from aijobs.learning.rules.english import EnglishRules
from aijobs.learning.rules.facts import ACRONYM, DEFINITION, Fact
from aijobs.learning.rules.text import PROSE, Sentence, split_sentences


@dataclass(frozen=True, slots=True)
class Reading:
    """What the notes say (`statements`), and what can be hidden in the other sentences (`gaps`)."""

    statements: list[Fact]
    gaps: list[Fact]


class NotesReader:
    """Reads notes by rules. Thread-safe."""

    def __init__(self, chinese: ChineseRules) -> None:
        self._chinese = chinese

    def read(self, notes: Mapping[str, Any], token: CancellationToken) -> Reading:
        """Return the facts of `notes` (`lang`, `segments`), in their order. Raises the token's errors."""
        sentences: list[Sentence] = []
        for segment in notes["segments"]:
            token.raise_if_cancelled()
            sentences += split_sentences(segment["sid"], segment["text"])
        sentences = sentences[1:] if _opens_with_a_title(sentences) else sentences
        english = EnglishRules([s for s in sentences if self._language(s, notes["lang"]) == "en"])
        rules: dict[str, EnglishRules | ChineseRules] = {"en": english, "zh": self._chinese}
        asked = _Asked()
        statements: list[Fact] = []
        quiet: list[Sentence] = []
        for sentence in _unhurried(sentences, token, 0, 60):
            said = rules[self._language(sentence, notes["lang"])].statements(sentence)
            found = [fact for fact in said if asked.is_new(fact)]
            statements += found
            if not any(fact.kind != ACRONYM for fact in found):
                quiet.append(sentence)
        terms = _terms(statements, sentences)
        gaps = [
            fact
            for sentence in _unhurried(quiet, token, 60, 100)
            for fact in rules[self._language(sentence, notes["lang"])].gaps(sentence, terms)
        ]
        return Reading(statements, gaps)

    @staticmethod
    def _language(sentence: Sentence, lang: str) -> str:
        return script_of(sentence.text) or lang


def _opens_with_a_title(sentences: Sequence[Sentence]) -> bool:
    """Return whether the notes' first line is their title: "Osmosis: a short guide" defines nothing."""
    if len(sentences) < 2 or sentences[0].kind != PROSE or sentences[0].text[-1] in ".!?。！？":
        return False
    first, second = sentences[0], sentences[1]
    return first.sid != second.sid or second.start - first.end > len("\r\n")


def _unhurried(sentences: Sequence[Sentence], token: CancellationToken, begin: int, end: int) -> Iterator[Sentence]:
    """Yield `sentences`, and check the token before each. Together they are the progress from `begin` to `end`
    percent.
    """
    for number, sentence in enumerate(sentences):
        token.raise_if_cancelled()
        token.progress(begin + (end - begin) * number // len(sentences))
        yield sentence


class _Asked:
    """The facts so far: the first definition of a term is the one that the notes mean."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def is_new(self, fact: Fact) -> bool:
        keys = {f"question:{fold(fact.question)}", f"{fact.kind}:{fold(fact.term)}"}
        if keys & self._keys:
            return False
        self._keys |= keys
        return True


def _terms(statements: Sequence[Fact], sentences: Sequence[Sentence]) -> list[str]:
    """Return what the notes define, abbreviate or print in bold, longest first, so that a part never hides the
    whole.
    """
    found = [fact.term for fact in statements if fact.kind in (DEFINITION, ACRONYM)]
    found += [strong for sentence in sentences for strong in sentence.strong if len(strong.split()) <= 4]
    terms = {fold(term): term.strip(" .:：。，,") for term in found if 2 <= len(term) <= 40 and "的" not in term}
    return sorted(terms.values(), key=lambda term: (-len(term), term))
