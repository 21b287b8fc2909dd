"""The shipped notes: long enough, and in the right language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import aijobs.job_types
from aijobs.job_types.flashcard_generation import Input
from aijobs.learning.notes import notes_from_text

FILES = sorted((Path(aijobs.job_types.__file__).parent / "sample_notes").glob("*.txt"))


def test_sample_notes_exist_in_each_language() -> None:
    assert [path.stem.partition("-")[0] for path in FILES] == ["en", "zh"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sample_notes_are_valid_input_in_their_language(path: Path) -> None:
    notes = notes_from_text(path.read_text("utf-8"), path.stem, path.name)

    model = Input.model_validate(notes)

    assert model.lang == path.stem[:2]
    assert 8 <= len(model.segments) <= 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sample_notes_have_six_hundred_words_or_nine_hundred_ideographs(path: Path) -> None:
    text = path.read_text("utf-8")

    assert len(text.split()) >= 600 or len(re.findall(r"[\u4e00-\u9fff]", text)) >= 900
