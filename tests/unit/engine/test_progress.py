"""Progress of an attempt: it never falls, is written at most twice a second, and its errors harm no attempt."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from aijobs.engine.failure import ErrorLog
from aijobs.engine.progress import Progress
from aijobs.engine.token import CANCELLED, CancellationToken
from aijobs.jobs.errors import LockLost
from aijobs.logs import Outage, get_logger
from tests.support.lines import captured_lines


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def error_log() -> ErrorLog:
    logger = get_logger("progress")
    return ErrorLog(logger, Outage(logger, "progress.database"), "progress.failed")


def test_progress_is_written_at_most_twice_a_second_and_never_falls() -> None:
    clock, written = Clock(), list[int]()
    progress = Progress(written.append, error_log(), clock)
    for tenth in range(40):
        clock.now = tenth / 10
        progress.show(tenth * 5 // 2)
        progress.show(tenth)
    assert written == sorted(set(written))
    assert len(written) <= 8
    clock.now = 10
    progress.show(100)
    progress.show(50)
    assert written[-1] == 80, "saving and projecting come after it"


def test_short_work_writes_no_progress() -> None:
    clock, written = Clock(), list[int]()
    progress = Progress(written.append, error_log(), clock)
    clock.now = 0.4
    for percent in range(101):
        progress.show(percent)
    assert written == []


@pytest.mark.parametrize("percent", [-5, 0, 101, 10**9])
def test_invalid_percentage_stays_between_10_and_80(percent: int) -> None:
    clock, written = Clock(), list[int]()
    progress = Progress(written.append, error_log(), clock)
    clock.now = 1
    progress.show(percent)
    assert all(10 <= shown <= 80 for shown in written)


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (OperationalError("UPDATE", {}, Exception("gone")), "progress.database.away"),
        (TypeError("mine"), "progress.failed"),
        (LockLost("j", "gone"), None),
    ],
)
def test_progress_error_is_logged_and_not_raised(error: Exception, event: str | None) -> None:
    clock, calls = Clock(), list[int]()

    def fails(percent: int) -> None:
        calls.append(percent)
        raise error

    progress = Progress(fails, error_log(), clock)
    with captured_lines() as lines:
        for second in range(1, 4):
            clock.now = second
            progress.show(10 * second)
        events: list[Any] = [line["event"] for line in lines()]
    assert events == ([event] if event else [])
    assert len(calls) == (1 if event is None else 3), "after a lost lease, nothing more is written"


def test_stopped_attempt_shows_no_more_progress() -> None:
    shown: list[int] = []
    token = CancellationToken(60, shown.append)
    token.progress(10)
    token.cancel(CANCELLED)
    token.progress(20)
    assert shown == [10]
