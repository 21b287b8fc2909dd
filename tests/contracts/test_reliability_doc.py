"""The reliability page names existing tests and rules for every promise, and the values of the settings."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from aijobs.monitor.check import LOST_MESSAGE
from aijobs.monitor.check_rules import PROMISES, RULES
from tests.contracts import documents
from tests.contracts.sources import ROOT

PAGE = "docs/reliability.md"


@cache
def known_tests() -> frozenset[str]:
    """Return the names of all test functions."""
    names = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return frozenset(name for name in names if name.startswith("test_"))


def section(number: int) -> tuple[str, str]:
    """Return a promise's heading and its text."""
    found = re.search(rf"^### {number}\. (.+)\n((?:(?!^##).*\n)*)", documents.read(PAGE), re.MULTILINE)
    assert found, f"promise {number} has no section"
    return found[1], found[2]


def items(text: str, after: str) -> list[str]:
    """Return the items of the list after a line."""
    found = re.search(rf"^{re.escape(after)}\n\n((?:- .+\n)+)", text, re.MULTILINE)
    assert found, f"no list after {after!r}"
    return [line.removeprefix("- ").strip("`") for line in found[1].splitlines()]


@pytest.mark.parametrize("number", PROMISES)
def test_page_has_each_promise_in_the_words_of_the_check(number: int) -> None:
    heading, text = section(number)
    assert heading.lower() == PROMISES[number].lower()
    assert len(items(text, "Held by")) >= 3


@pytest.mark.parametrize("number", PROMISES)
def test_each_promise_names_exactly_its_rules(number: int) -> None:
    rules = [rule.what for rule in RULES if rule.promise == number]
    if number == 5:
        rules.append(LOST_MESSAGE)
    assert items(section(number)[1], "`aijobs check` looks for a job that") == rules


def test_page_names_only_existing_tests() -> None:
    named = re.findall(r"`(test_[a-z0-9_]+)`", documents.read(PAGE))
    assert named
    assert not [name for name in named if name not in known_tests()]


def test_page_names_only_existing_modules() -> None:
    named = re.findall(r"`((?:aijobs|tests|bench)/[\w/]+(?:\.py)?)`", documents.read(PAGE))
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
