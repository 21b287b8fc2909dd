"""Templates, script and style sheet are laid out to be read: no line is longer than a screen."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 160


def too_long(path: Path) -> list[str]:
    """Return the place of each line that is too long."""
    lines = path.read_text().splitlines()
    return [f"{path.name}:{number}" for number, line in enumerate(lines, 1) if len(line) > LONGEST]


FILES = [*sorted((ROOT / "templates").rglob("*.html")), ROOT / "static" / "app.js", ROOT / "static" / "app.css"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_line_is_over_160_characters(path: Path) -> None:
    assert too_long(path) == []


def test_line_over_160_characters_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<p>\n{'x' * (LONGEST + 1)}\n</p>\n")
    assert too_long(page) == ["page.html:2"]
