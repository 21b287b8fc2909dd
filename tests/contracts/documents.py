"""The documentation for tests: pages, code blocks, tables, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.contracts.sources import ROOT

_BLOCK = re.compile(r"^```(?P<language>\w*)(?: (?P<title>\S+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the title after it, its text."""

    language: str
    title: str | None
    text: str


@cache
def pages() -> tuple[Path, ...]:
    """Return every page for readers: those at the top and all below `docs/`."""
    return (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    return [Block(m["language"], m["title"], m["text"]) for m in _BLOCK.finditer(text)]


def prose(text: str) -> str:
    """Return the page without its code blocks."""
    return _BLOCK.sub("", text)


def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    found = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def links(text: str) -> list[str]:
    """Return the targets of links and pictures."""
    return re.findall(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", prose(text))


def rows(text: str) -> list[list[str]]:
    """Return the cells of every table row except headings and rulers."""
    found = []
    for line in prose(text).splitlines():
        if line.startswith("|") and not re.match(r"^\|[\s:|-]+\|$", line):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))])
    return found
