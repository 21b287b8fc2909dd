"""Layout of text on a terminal."""

from __future__ import annotations

import io

import pytest

from aijobs.cli.terminal import Terminal, cells, wrap
from aijobs.settings import plain_terminal


@pytest.mark.parametrize(
    ("text", "width"), [("abc", 3), ("光合作用", 8), ("e\u0301", 1), ("ＡＢ", 4), ("a\u200bb", 2), ("", 0)]
)
def test_wide_characters_take_two_cells_and_combining_characters_none(text: str, width: int) -> None:
    assert cells(text) == width


@pytest.mark.parametrize("width", [20, 21, 33])
def test_wrapped_lines_fit_the_terminal_and_keep_all_text(width: int) -> None:
    text = (
        "Photosynthesis（光合作用）是植物、藻类和某些细菌利用光能，把二氧化碳和水转化为有机物的过程。"
        " It takes place in the chloroplasts: “small organelles” of 5–10 µm."
    )
    lines = wrap(text, width)
    assert all(0 < cells(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_english_breaks_between_words() -> None:
    assert wrap("one two three four", 9) == ["one two", "three", "four"]


def test_chinese_breaks_between_characters_but_not_before_a_full_stop() -> None:
    assert wrap("光合作用。光反应", 8) == ["光合作", "用。光反", "应"]


def test_opening_quote_stays_with_its_text() -> None:
    assert wrap("光合“作用”", 5) == ["光合", "“作", "用”"]


def test_word_wider_than_the_line_is_broken() -> None:
    assert wrap("abcdefgh xy", 3) == ["abc", "def", "gh", "xy"]


def test_line_breaks_and_tabs_of_the_text_become_spaces() -> None:
    assert wrap("one\n\ttwo", 20) == ["one two"]


def test_output_without_a_terminal_has_plain_lines() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    terminal.progress("working")
    terminal.say(terminal.style("done", bold=True))
    assert stream.getvalue() == "working\ndone\n"


def test_progress_line_on_a_terminal_is_erased_before_the_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    terminal = Terminal(stream)
    terminal.progress("working")
    terminal.say(terminal.style("done", fg="red"))
    assert stream.getvalue() == "working\r\x1b[2Kdone\n"


@pytest.mark.parametrize(
    ("environ", "plain"),
    [({}, False), ({"NO_COLOR": ""}, False), ({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, True)],
)
def test_no_color_is_respected(environ: dict[str, str], plain: bool) -> None:
    assert plain_terminal(environ) is plain
