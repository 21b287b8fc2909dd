"""Rules for texts that people type: kept, dropped and refused characters."""

from __future__ import annotations

import pytest

from aijobs.texts import clean_line, clean_text, line_fault

UNSEEN = ["\x1b", "\x07", "\0", "\x7f", "\x9b", "\u202e", "\u2066", "\u200b", "\u200f", "\ufeff", "\ud800", "\ue000"]


@pytest.mark.parametrize("unseen", UNSEEN, ids=ascii)
def test_invisible_character_is_dropped_from_a_reason_and_refused_in_a_label(unseen: str) -> None:
    assert clean_text(f"{unseen}be{unseen}fore\n{unseen}after{unseen}") == "before\nafter"
    assert clean_line(f"be{unseen}fore") == "before"
    assert line_fault(f"be{unseen}fore", 100) == "holds a control character or an invisible one"


@pytest.mark.parametrize("text", ["Größe", "原因：服务恢复", "a  b", '1 < 2 & "x"', "💡"])
def test_visible_text_is_kept_unchanged(text: str) -> None:
    assert clean_text(text) == clean_line(text) == text
    assert line_fault(text, 100) is None


def test_all_line_ends_become_line_feeds() -> None:
    assert clean_text("  a\r\nb \rc\u2028d\n\n") == "a\nb\nc\nd"
    assert clean_line("a\tb\u00a0c\u3000d\n") == "a b c d"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has 1–3 characters"),
        ("abcd", "has 1–3 characters"),
        (" a", "has a space at one end"),
        ("a\n", "has a space at one end"),
        ("a\nb", "holds a control character or an invisible one"),
    ],
)
def test_invalid_line_is_refused_with_the_reason(text: str, fault: str) -> None:
    assert line_fault(text, 3) == fault
