"""Conversion of plain text to a job's input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.job_types.flashcard_generation import Input
from aijobs.learning.grounding import fold
from aijobs.learning.notes import MAX_CHARACTERS, MAX_SEGMENTS, NotesError, notes_from_text


def texts(text: str) -> list[str]:
    return [segment["text"] for segment in notes_from_text(text, "t", "s")["segments"]]


def test_paragraphs_become_segments_and_a_heading_stays_with_its_paragraph() -> None:
    text = "Title\n\nOne is one.\nStill one.\r\n\r\nPart two\n\n  Two is two.  \n \t\nThree is three."

    assert texts(text) == ["Title", "One is one.\nStill one.", "Part two\n\n  Two is two.", "Three is three."]


def test_language_is_detected_from_the_text() -> None:
    assert notes_from_text("植物利用光能制造有机物。", "t", "s")["lang"] == "zh"
    assert notes_from_text("Plants make sugar.", "t", "s")["lang"] == "en"


def test_paragraphs_beyond_the_limit_are_merged_without_loss() -> None:
    text = "\n\n".join(f"Sentence number {n} ends." for n in range(MAX_SEGMENTS * 2 + 7))

    found = texts(text)

    assert len(found) <= MAX_SEGMENTS
    assert "\n\n".join(found) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty"),
        (" \n\t\ufeff", "empty"),
        ("\ufeff", "empty"),
        ("a\x00b", "NUL"),
        ("x" * (MAX_CHARACTERS + 1), "at most"),
    ],
)
def test_unusable_text_is_refused_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(NotesError, match=complaint) as caught:
        notes_from_text(text, "t", "s")

    assert "\n" not in str(caught.value)


@given(
    text=st.text(st.sampled_from("ab。. \n\r\f#汉字"), min_size=1, max_size=200) | st.text(min_size=1),
    title=st.text(max_size=400),
    source=st.text(max_size=300),
)
def test_notes_from_any_text_are_valid_input(text: str, title: str, source: str) -> None:
    try:
        notes = notes_from_text(text, title, source)
    except NotesError:
        assert not fold(text) or "\x00" in text
    else:
        model = Input.model_validate(notes)
        kept = "".join(segment.text for segment in model.segments)
        assert "".join(kept.split()) == "".join(text.lstrip("\ufeff").split())
