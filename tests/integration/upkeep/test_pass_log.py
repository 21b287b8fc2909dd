"""A duty that fails, or that nobody does, is seen: it would look like one that has nothing to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import event, select

from aijobs.jobs.models import PASSES, PassRun
from aijobs.monitor.passes import read_passes
from aijobs.monitor.views import PassRow
from aijobs.upkeep.pass_log import PassLog
from tests.support.jobs import Kit

REAPER_S = 30.0


class Time:
    """A process's monotonic clock, moved with the database's."""

    def __init__(self, kit: Kit) -> None:
        self.kit, self.now = kit, 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.kit.advance(seconds)


@pytest.fixture
def time(kit: Kit) -> Time:
    return Time(kit)


@pytest.fixture
def log(kit: Kit, time: Time) -> PassLog:
    return PassLog(kit.database, kit.clock, time)


def passes(kit: Kit) -> dict[str, PassRow]:
    with kit.database.read() as session:
        return {row.name: row for row in read_passes(session, kit.clock, PASSES)}


def fail() -> None:
    raise TypeError("notes of a learner")


def fails(log: PassLog, name: str = "reaper") -> None:
    with pytest.raises(TypeError):
        log.run(name, REAPER_S, fail)


def works(log: PassLog, name: str = "reaper") -> None:
    assert log.run(name, REAPER_S, lambda: 7) == 7


def test_a_duty_that_was_never_done_is_overdue(kit: Kit) -> None:
    assert {row.state for row in passes(kit).values()} == {"overdue"}
    assert list(passes(kit)) == list(PASSES)


def test_a_duty_that_starts_to_fail_is_red_at_once_and_the_others_stay_green(
    kit: Kit, log: PassLog, time: Time
) -> None:
    works(log)
    works(log, "redrive")
    time.advance(1)
    fails(log)
    reaper, redrive = passes(kit)["reaper"], passes(kit)["redrive"]
    assert (reaper.state, reaper.failures, reaper.error) == ("failing", 1, "TypeError")
    assert (redrive.state, redrive.failures, redrive.error) == ("on_time", 0, None)


def test_a_duty_that_goes_on_failing_is_overdue_after_three_periods_and_green_after_one_that_works(
    kit: Kit, log: PassLog, time: Time
) -> None:
    works(log)
    done = passes(kit)["reaper"].succeeded_at
    for _ in range(4):
        time.advance(REAPER_S)
        fails(log)
    found = passes(kit)["reaper"]
    assert (found.state, found.failures, found.succeeded_at) == ("overdue", 4, done)
    works(log)
    found = passes(kit)["reaper"]
    assert (found.state, found.failures, found.error) == ("on_time", 0, None)
    assert found.succeeded_at != done


def test_a_duty_that_nobody_does_any_more_is_overdue_though_its_last_round_went_well(
    kit: Kit, log: PassLog, time: Time
) -> None:
    works(log)
    time.advance(3 * REAPER_S + 10)  # A note may be ten seconds old where all goes as before.
    assert passes(kit)["reaper"].state == "on_time"
    time.advance(0.1)
    assert passes(kit)["reaper"].state == "overdue"


def test_a_duty_is_done_if_any_process_does_it(kit: Kit, log: PassLog, time: Time) -> None:
    fails(log)
    works(PassLog(kit.database, kit.clock, time))
    assert passes(kit)["reaper"].state == "on_time"


def test_a_pass_of_each_second_does_not_write_each_second(kit: Kit, log: PassLog, time: Time) -> None:
    written: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if statement.startswith("UPDATE pass_runs"):
            written.append(statement)

    works(log)
    event.listen(kit.database.engine, "before_cursor_execute", note)
    try:
        for _ in range(20):
            time.advance(1)
            works(log)
    finally:
        event.remove(kit.database.engine, "before_cursor_execute", note)
    assert len(written) == 2
    assert passes(kit)["reaper"].state == "on_time"


def test_a_note_that_cannot_be_written_harms_no_pass(
    kit: Kit, log: PassLog, broken_database: Callable[[Kit], object]
) -> None:
    broken_database(kit)
    works(log)
    fails(log)


@pytest.fixture
def broken_database() -> Callable[[Kit], object]:
    """Takes the table away, which any statement on it finds out."""

    def take_away(kit: Kit) -> None:
        with kit.database.transaction() as session:
            session.connection().exec_driver_sql("ALTER TABLE pass_runs RENAME TO elsewhere")

    return take_away


def test_an_errors_words_are_not_kept(kit: Kit, log: PassLog) -> None:
    fails(log)
    with kit.database.read() as session:
        (row,) = session.execute(select(PassRun)).scalars()
    assert "learner" not in f"{row.error}"
