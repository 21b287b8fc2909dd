"""The facts that rules find in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from aijobs.learning.rules.text import Sentence

DEFINITION, QUESTION, TERM, ACRONYM, NUMBER, NAME = (
    "definition",
    "question",
    "term",
    "acronym",
    "number",
    "name",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact that a learner can be asked about.

    Either `question` and `answer`, or `gap`: the words of `sentence.text` to hide (then `question` is the text with
    them). `term` is its subject, used to avoid repetitions and to hide it elsewhere.
    """

    kind: str
    lang: str
    sentence: Sentence
    question: str
    answer: str = ""
    gap: str = ""
    term: str = ""
