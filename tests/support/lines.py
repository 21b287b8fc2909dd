"""The log as lines: what our JSON renderer would write to stderr."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

from aijobs.logs import configure


@contextlib.contextmanager
def captured_lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Within it, `lines()` gives what was logged so far, from every thread, one dict a line."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    configure("INFO", stream=stream)
    try:
        yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
