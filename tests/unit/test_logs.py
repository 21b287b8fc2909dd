"""Loggers that stay silent, and log lines limited to one a minute with a count of the suppressed ones."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from aijobs import logs
from aijobs.logs import Sparing


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Collect all log lines at DEBUG level."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure("DEBUG", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("name", ["openai", "httpx2", "httpcore2", "sqlalchemy.engine", "jieba"])
@pytest.mark.parametrize("below", ["", ".connection"])
def test_loggers_of_libraries_that_log_content_are_silent_below_warning(
    log: io.StringIO, name: str, below: str
) -> None:
    loggers = {each: each.level for each in (logging.getLogger(name), logging.getLogger(name + below))}
    try:
        for each in loggers:
            each.setLevel(logging.DEBUG)
            each.debug("Request options: %s", {"messages": "CANARY"})
            each.info("INSERT %s", "CANARY")
            each.warning("a warning is heard")
    finally:
        for each, level in loggers.items():
            each.setLevel(level)
    assert "CANARY" not in log.getvalue()
    assert log.getvalue().count("a warning is heard") == len(loggers)
    logging.getLogger("huey").debug("others are heard at their level")
    assert "others are heard" in log.getvalue()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_line_is_logged_once_a_minute_with_the_number_of_suppressed_ones() -> None:
    clock = Clock()
    sparing = Sparing(60, clock)
    assert [sparing.may_say("a") for _ in range(4)] == [0, None, None, None]
    assert sparing.may_say("b") == 0
    clock.now = 59.9
    assert sparing.may_say("a") is None
    clock.now = 60.0
    assert [sparing.may_say("a"), sparing.may_say("a")] == [4, None]


def test_memory_of_suppressed_lines_is_limited() -> None:
    clock = Clock()
    sparing = Sparing(60, clock)
    for number in range(1000):
        clock.now += 1
        assert sparing.may_say(f"name-{number}") == 0
    assert len(sparing._said) <= 61
