"""What people may type as a reason, a name or a label: one rule for API, console and command line.

Control characters, invisible format characters and bidirectional overrides are in none of them: they would act in a
terminal or a log viewer, or make a text look like another one.
"""

from __future__ import annotations

import re


def clean_text(text: str) -> str:
    """A text of several lines without what can't be seen; every line ends with a line feed, none is at either end."""
    return "\n".join(_visible(line).rstrip() for line in text.splitlines()).strip()


def clean_line(text: str) -> str:
    """As `clean_text`, on one line."""
    return _visible(text).strip()


def line_fault(text: str, longest: int) -> str | None:
    """Why a text can't be a name or a label of at most `longest` characters, or None."""
    if not 1 <= len(text) <= longest:
        return f"has 1–{longest} characters"
    if text != text.strip():
        return "has a space at one end"
    if text != clean_line(text):
        return "holds a control character or an invisible one"
    return None


def _visible(text: str) -> str:
    return "".join(c for c in re.sub(r"\s", " ", text) if c.isprintable())
