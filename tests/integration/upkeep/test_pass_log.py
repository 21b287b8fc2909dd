"""The log of passes: it shows passes that fail or don't run."""

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
    """A process's monotonic clock, which advances with the database's clock."""

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


def test_pass_that_never_ran_is_overdue(kit: Kit) -> None:
    assert {row.state for row in passes(kit).values()} == {"overdue"}
    assert list(passes(kit)) == list(PASSES)


def test_pass_is_failing_after_its_first_error_and_others_stay_on_time(kit: Kit, log: PassLog, time: Time) -> None:
    works(log)
    works(log, "redrive")
    time.advance(1)
    fails(log)
    reaper, redrive = passes(kit)["reaper"], passes(kit)["redrive"]
    assert (reaper.state, reaper.failures, reaper.error) == ("failing", 1, "TypeError")
    assert (redrive.state, redrive.failures, redrive.error) == ("on_time", 0, None)


def test_failing_pass_is_overdue_after_three_periods_and_on_time_after_a_success(
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


def test_pass_that_stops_running_is_overdue_after_its_last_success(kit: Kit, log: PassLog, time: Time) -> None:
    works(log)
    time.advance(3 * REAPER_S + 10)  # While nothing changes, the row may be ten seconds old.
    assert passes(kit)["reaper"].state == "on_time"
    time.advance(0.1)
    assert passes(kit)["reaper"].state == "overdue"


def test_pass_is_on_time_if_any_process_runs_it(kit: Kit, log: PassLog, time: Time) -> None:
    fails(log)
    works(PassLog(kit.database, kit.clock, time))
    assert passes(kit)["reaper"].state == "on_time"


def test_pass_that_runs_each_second_writes_every_ten_seconds(kit: Kit, log: PassLog, time: Time) -> None:
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


def test_pass_runs_if_its_result_cannot_be_written(
    kit: Kit, log: PassLog, broken_database: Callable[[Kit], object]
) -> None:
    broken_database(kit)
    works(log)
    fails(log)


@pytest.fixture
def broken_database() -> Callable[[Kit], object]:
    """Return a function that renames the table, so that each statement on it fails."""

    def rename_table(kit: Kit) -> None:
        with kit.database.transaction() as session:
            session.connection().exec_driver_sql("ALTER TABLE pass_runs RENAME TO elsewhere")

    return rename_table


def test_error_text_is_not_stored(kit: Kit, log: PassLog) -> None:
    fails(log)
    with kit.database.read() as session:
        (row,) = session.execute(select(PassRun)).scalars()
    assert "learner" not in f"{row.error}"
