"""The connection pool logs nothing about a lost database, because the outage is logged elsewhere."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from aijobs import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    logs.configure("DEBUG", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_lost_connection_logs_no_stack_trace(stream: io.StringIO) -> None:
    pool = logging.getLogger("sqlalchemy.pool.impl.QueuePool")
    try:
        raise ConnectionResetError("canary")
    except ConnectionResetError:
        pool.error("Exception during reset or similar", exc_info=True)
    assert stream.getvalue() == ""
