"""The tour of the code links to files that exist, and each name that it links is defined in that file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.contracts import documents
from tests.contracts.sources import ROOT

PAGE = "docs/tour.md"
MAP = "aijobs/__init__.py"
"""Linked as a file, because it defines no name."""


def code_links() -> list[tuple[str, Path]]:
    """Return text and file of each link to a source file."""
    found = re.findall(r"\[([^\]]+)\]\(\.\./([\w/]+\.py)\)", documents.read(PAGE))
    return [(text.strip("`"), ROOT / path) for text, path in found]


def defined(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield the names that a module or class defines; members have the class's name and a dot before theirs."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def missing(links: Sequence[tuple[str, Path]]) -> list[str]:
    """Return the links whose file or name doesn't exist."""
    return [
        f"{name} in {path.relative_to(ROOT)}"
        for name, path in links
        if not path.is_file() or (name != MAP and name not in defined(ast.parse(path.read_text(encoding="utf-8")).body))
    ]


def test_tour_names_only_code_that_exists() -> None:
    links = code_links()
    assert len(links) > 50
    assert missing(links) == []


def test_tour_check_finds_a_name_or_a_file_that_has_moved() -> None:
    moved = [("Ending.finish", ROOT / "aijobs/engine/ending.py"), ("Ending", ROOT / "aijobs/engine/settle.py")]
    assert missing([*moved, ("Ending.end", ROOT / "aijobs/engine/ending.py")]) == [
        "Ending.finish in aijobs/engine/ending.py",
        "Ending in aijobs/engine/settle.py",
    ]
