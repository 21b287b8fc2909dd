"""States and types are members of their enums: product code spells none of them as text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import StrEnum

import pytest

from aijobs.ai.calling.breaker import CircuitState
from aijobs.ai.models import CallState
from aijobs.jobs.history import HistoryType
from aijobs.jobs.status import JobState, Phase
from aijobs.outbox.models import OutboxEventType, OutboxState
from tests.contracts.sources import Module, modules, sample

ENUMS: tuple[type[StrEnum], ...] = (JobState, Phase, HistoryType, OutboxEventType, OutboxState, CallState, CircuitState)
VALUES = frozenset(str(member) for enum in ENUMS for member in enum)
AMBIGUOUS = frozenset({"created", "done", "failed", "lost", "running", "unknown"})
"""Values that other texts have too, such as keys of JSON answers. They are refused only beside a column."""
COLUMNS = frozenset({"lifecycle_status", "newest_status", "status", "state", "phase", "type", "event_type", "word"})
"""Names of columns and fields that hold a state or type."""
RECORDERS = frozenset({"Note", "record"})
"""Calls that take a history type."""
CATALOGUES = frozenset({"aijobs.web.console.words"})
"""Modules whose dictionaries translate stored values for people."""


def literals(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each value that `module` spells out."""
    allowed = set(_allowed(module))
    for node in ast.walk(module.tree):
        for each in _texts(node) if _asks_for_a_state(node) else ():
            if each.value in VALUES and each not in allowed:
                yield each.lineno, each.value
        if isinstance(node, ast.Constant) and node.value in VALUES - AMBIGUOUS and node not in allowed:
            yield node.lineno, str(node.value)


def _allowed(module: Module) -> Iterator[ast.AST]:
    """Yield the constants of the enums themselves, of the legacy names and of the catalogues."""
    for node in ast.walk(module.tree):
        is_enum = isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "StrEnum" for base in node.bases)
        if is_enum or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STATUS_TO_LIFECYCLE"):
            yield from ast.walk(node)
        elif isinstance(node, ast.Dict) and module.name in CATALOGUES:
            yield from (key for key in node.keys if key is not None)


def _asks_for_a_state(node: ast.AST) -> bool:
    """Whether texts in `node` stand beside a column of a state or type."""
    if isinstance(node, ast.Compare):
        return any(_is_column(each) for each in (node.left, *node.comparators))
    if isinstance(node, ast.keyword):
        return node.arg in COLUMNS
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in ("in_", "not_in"):
            return _is_column(function.value)
        return isinstance(function, ast.Name) and function.id in RECORDERS
    return isinstance(node, ast.Assign) and _is_column(node.targets[0])


def _is_column(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in COLUMNS


def _texts(node: ast.AST) -> list[ast.Constant]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def test_no_module_contains_a_literal_state_or_type() -> None:
    found = {f"{module.at(line)}: {text!r}" for module in modules() for line, text in literals(module)}
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize(
    "source",
    [
        'if job.lifecycle_status == "succeeded": pass',
        'if "failed" != job.lifecycle_status: pass',
        'if row.state in ("done", "lost"): pass',
        'query.where(AiJobEvent.type.in_(("created",)))',
        'row = AiUsageLog(state="failed")',
        'record(session, clock, job, "created")',
        'note = Note("created" if first else other)',
        'job.lifecycle_status = "running"',
        'ENDS = ("retry_scheduled", "released")',
        'STEPS = {"cancel_requested": 1}',
        'def end(): return "ai.job.completed"',
        'BreakerState(scope, "half_open")',
    ],
)
def test_literal_state_is_found(source: str) -> None:
    assert list(literals(sample(source)))


@pytest.mark.parametrize(
    "source",
    [
        'flash(text, "done")',
        'write_json({"created": 3})',
        'class JobState(StrEnum):\n    QUEUED = "queued"',
        "if job.lifecycle_status == JobState.QUEUED: pass",
        'f"is {job.lifecycle_status}"',
    ],
)
def test_other_texts_are_not_reported(source: str) -> None:
    assert not list(literals(sample(source)))


def test_ambiguous_values_are_values_of_the_enums() -> None:
    assert AMBIGUOUS < VALUES


@pytest.mark.parametrize("enum", ENUMS)
def test_enum_member_behaves_like_its_text(enum: type[StrEnum]) -> None:
    """JSON, SQL and log lines hold the value, as long as a member is a `str` and prints as one."""
    for member in enum:
        assert (member, f"{member}", str(member)) == (member.value,) * 3
        assert hash(member) == hash(member.value)
