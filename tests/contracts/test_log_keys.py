"""No log call passes a key that a structlog processor writes, because the processor would overwrite the value."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from aijobs import logs
from tests.contracts.sources import Module, modules, sample
from tests.support.lines import captured_lines

METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log", "msg", "bind", "bind_contextvars"}
BUILDERS = {"job_fields"}
"""Functions that return the fields of a line."""


def written_by_processors() -> set[str]:
    """Return the keys of a real log line whose call passed none."""
    with captured_lines() as lines:
        try:
            raise ValueError
        except ValueError:
            logs.get_logger("sample").exception("sample.failed")
    (line,) = lines()
    return set(line)


RESERVED = written_by_processors()


def overwritten(module: Module) -> Iterator[str]:
    """Yield each place in `module` that passes such a key to a logger."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and _is_of_the_log(node.func):
            for name in _names(node):
                if name in RESERVED:
                    yield f"{module.at(node.lineno)}: {name}"


def _is_of_the_log(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr in METHODS
    return isinstance(function, ast.Name) and function.id in METHODS | BUILDERS


def _names(call: ast.Call) -> Iterator[str]:
    """Yield the keyword names of a call, including those of a literal dict after `**`."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg
        elif isinstance(keyword.value, ast.Dict):
            for key in keyword.value.keys:
                if isinstance(key, ast.Constant):
                    yield str(key.value)


def test_processors_write_the_documented_keys() -> None:
    assert {"at", "event", "level", "logger"} <= RESERVED


def test_no_log_call_passes_a_key_that_a_processor_writes() -> None:
    found = [line for module in modules() for line in overwritten(module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "logger.error('web.failed', at=[])",
        "self._logger.warning('x', **{'level': 1})",
        "logger.info('x', **job_fields(job, event='y'))",
        "structlog.contextvars.bind_contextvars(logger='z')",
    ],
)
def test_log_call_with_a_reserved_key_is_found(line: str) -> None:
    assert list(overwritten(sample(line)))
