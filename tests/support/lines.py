"""The log as the lines that the JSON renderer writes."""

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
    """Yield a function that returns what all threads have logged so far, one dict per line."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    configure("INFO", stream=stream)
    try:
        yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
