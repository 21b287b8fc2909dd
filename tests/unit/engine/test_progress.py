"""How far an attempt is: never falling, twice a second at most, and nobody's trouble."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from aijobs.engine.failure import DatabaseTrouble
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


def trouble() -> DatabaseTrouble:
    logger = get_logger("progress")
    return DatabaseTrouble(logger, Outage(logger, "progress.database"), "progress.failed")


def test_it_is_written_twice_a_second_at_most_and_never_falls() -> None:
    clock, written = Clock(), list[int]()
    progress = Progress(written.append, trouble(), clock)
    for tenth in range(40):
        clock.now = tenth / 10
        progress.show(tenth * 5 // 2)
        progress.show(tenth)
    assert written == sorted(set(written))
    assert len(written) <= 8
    clock.now = 10
    progress.show(100)
    progress.show(50)
    assert written[-1] == 80, "saving and projecting are still to come"


def test_short_work_writes_nothing() -> None:
    clock, written = Clock(), list[int]()
    progress = Progress(written.append, trouble(), clock)
    clock.now = 0.4
    for percent in range(101):
        progress.show(percent)
    assert written == []


@pytest.mark.parametrize("percent", [-5, 0, 101, 10**9])
def test_an_odd_percentage_stays_within_the_works_own_part(percent: int) -> None:
    clock, written = Clock(), list[int]()
    progress = Progress(written.append, trouble(), clock)
    clock.now = 1
    progress.show(percent)
    assert all(10 <= shown <= 80 for shown in written)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OperationalError("UPDATE", {}, Exception("gone")), "progress.database.away"),
        (TypeError("mine"), "progress.failed"),
        (LockLost("j", "gone"), None),
    ],
)
def test_what_goes_wrong_with_it_reaches_no_attempt(error: Exception, said: str | None) -> None:
    clock, calls = Clock(), list[int]()

    def fails(percent: int) -> None:
        calls.append(percent)
        raise error

    progress = Progress(fails, trouble(), clock)
    with captured_lines() as lines:
        for second in range(1, 4):
            clock.now = second
            progress.show(10 * second)
        told: list[Any] = [line["event"] for line in lines()]
    assert told == ([said] if said else [])
    assert len(calls) == (1 if said is None else 3), "who lost the job asks no more"


def test_an_attempt_that_must_stop_shows_nothing_more() -> None:
    shown: list[int] = []
    token = CancellationToken(60, shown.append)
    token.progress(10)
    token.cancel(CANCELLED)
    token.progress(20)
    assert shown == [10]
