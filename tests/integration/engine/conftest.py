"""An engine over the services, and what it logs."""

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
    """`log_lines()`: what was logged since the test began, at DEBUG, as the JSON lines that a worker writes."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure("DEBUG", stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def stage(kit: Kit) -> Iterator[Stage]:
    """An engine over each database in turn; the clock stands still until it is moved, deadlines are real."""
    with open_stage(kit) as opened:
        yield opened


@pytest.fixture
def sqlite_stage(sqlite_kit: Kit) -> Iterator[Stage]:
    """As `stage`, for what has nothing to do with the kind of database."""
    with open_stage(sqlite_kit) as opened:
        yield opened
