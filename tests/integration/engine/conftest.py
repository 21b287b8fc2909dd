"""Fixtures: an engine over the services, and its log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aijobs import logs
from tests.integration.engine.stage import Stage, open_stage
from tests.support.jobs import Kit


@pytest.fixture
def log_lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Return a function that returns the log lines since the start of the test, at DEBUG, as a worker writes them."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure("DEBUG", stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def stage(kit: Kit) -> Iterator[Stage]:
    """Open an engine over each database, with a frozen clock; deadlines are real."""
    with open_stage(kit) as opened:
        yield opened


@pytest.fixture
def sqlite_stage(sqlite_kit: Kit) -> Iterator[Stage]:
    """Open an engine over SQLite, for behaviour that doesn't depend on the kind of database."""
    with open_stage(sqlite_kit) as opened:
        yield opened
