"""What the rules find in a sentence, before it becomes a card."""

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
    """Something that a learner can be asked.

    Either `question` and `answer`, or `gap`: the words of `sentence.text` to hide (then `question` is the
    text that they are hidden in). `term` is what the fact is about, for not asking twice and for hiding it
    elsewhere.
    """

    kind: str
    lang: str
    sentence: Sentence
    question: str
    answer: str = ""
    gap: str = ""
    term: str = ""
