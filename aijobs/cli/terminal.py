"""Text on a terminal: its width in cells, and wrapping without a comma at the start of a line."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from typing import TextIO

import click

from aijobs.settings import plain_terminal

_STICKS_TO_THE_LEFT = frozenset(",.;:!?%)]}”’»…、，。；：！？）】》」』〉·％—")
_STICKS_TO_THE_RIGHT = frozenset("([{“‘«（【《「『〈")
_WIDEST = 100


def cells(text: str) -> int:
    """Return the width of `text` in cells of a terminal: two for each wide character, none for a combining one."""
    return sum(_cells_of(character) for character in text)


def _cells_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Cc", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrap(text: str, width: int) -> list[str]:
    """Return `text` in lines of at most `width` cells. Chinese breaks between characters, English between words.

    A word that is wider than a line is broken.
    """
    lines: list[str] = []
    line = ""
    for space, unit in _units(" ".join(text.split())):
        joined = f"{line}{' ' if space and line else ''}{unit}"
        if cells(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        while cells(unit) > width:
            head = _head(unit, width)
            lines.append(head)
            unit = unit[len(head) :]  # noqa: PLW2901 - what is left of the word
        line = unit
    return [*lines, line] if line else lines


def _units(text: str) -> list[tuple[bool, str]]:
    """Divide a text into unbreakable units, each with whether a space stands before it."""
    units: list[tuple[bool, str]] = []
    space = False
    for character in text:
        if character == " ":
            space = True
            continue
        previous = units[-1][1] if units else ""
        wide = _cells_of(character) == 2 and character not in _STICKS_TO_THE_LEFT
        before_is_wide = bool(previous) and _cells_of(previous[-1]) == 2
        sticks = character in _STICKS_TO_THE_LEFT or previous[-1:] in _STICKS_TO_THE_RIGHT
        breaks = wide or before_is_wide
        if units and not space and (sticks or not breaks or _cells_of(character) == 0):
            units[-1] = (units[-1][0], previous + character)
        else:
            units.append((space, character))
        space = False
    return units


def _head(text: str, width: int) -> str:
    """Return as much of the start of `text` as fits, at least one character."""
    taken = 0
    for index, character in enumerate(text):
        taken += _cells_of(character)
        if taken > width and index:
            return text[:index]
    return text


class Terminal:
    """The output of a command: colours and a moving line on a terminal, plain lines everywhere else."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._moving = False
        self.is_terminal = self._stream.isatty()
        self.colours = self.is_terminal and not plain_terminal()
        self.width = min(shutil.get_terminal_size((80, 24)).columns, _WIDEST) if self.is_terminal else 80

    def say(self, text: str = "") -> None:
        """Print one line or more, after removing the moving line."""
        self._clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def progress(self, text: str) -> None:
        """Show progress: in the moving line on a terminal, as a new line elsewhere."""
        if not self.is_terminal:
            self.say(text)
            return
        self._clear()
        self._stream.write(_head(text, self.width - 1))
        self._stream.flush()
        self._moving = True

    def paragraph(self, text: str, *, indent: str = "", first: str | None = None, **style: bool | str) -> None:
        """Print `text` wrapped to the terminal, each line after `indent`, the first one after `first` instead."""
        lines = wrap(text, max(self.width - cells(indent), 20))
        for number, line in enumerate(lines):
            lead = indent if number or first is None else first
            self.say(lead + self.style(line, **style))

    def style(self, text: str, **style: bool | str) -> str:
        """Return `text` in a colour or weight (click.style's words), unless the output is plain."""
        return click.style(text, **style) if self.colours and style else text  # type: ignore[arg-type]

    def _clear(self) -> None:
        if self._moving:
            self._stream.write("\r\x1b[2K")
            self._moving = False
