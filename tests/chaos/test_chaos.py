"""The promises, held while everything breaks that can: the same run as `make chaos`, by seed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.chaos.__main__ import EXIT_MISSING
from tests.chaos.plan import build_plan
from tests.chaos.provider import STEPS
from tests.support.processes import Processes
from tests.support.servers import ServerMissing, skip_or_fail

ROOT = Path(__file__).parents[2]


def play(processes: Processes, *options: str, timeout: float) -> str:
    """One run, in a process of its own, as it changes what Python finds; its summary."""
    program = processes.spawn([sys.executable, "-m", "tests.chaos", *options], cwd=ROOT, name="chaos")
    code = program.wait(timeout)
    if code == EXIT_MISSING:
        skip_or_fail(ServerMissing(program.output.strip()))
    assert code == 0, program.output
    assert "every promise was kept" in program.output
    return program.output


@pytest.mark.timeout(200)
def test_ten_seconds_of_chaos_break_no_promise(processes: Processes) -> None:
    output = play(processes, "--database", "sqlite", "--seed", "160", "--seconds", "10", timeout=180)
    assert "tracebacks  0" in output


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "database",
    [
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.postgres),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ],
)
def test_a_minute_of_chaos_breaks_no_promise_on_any_database(processes: Processes, database: str) -> None:
    play(processes, "--database", database, "--seed", "20", "--seconds", "60", timeout=350)


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"])
def test_a_seed_is_one_sequence_and_another_seed_another(database: str) -> None:
    plan = build_plan(5, 60, database)
    assert str(plan) == str(build_plan(5, 60, database))
    assert str(plan) != str(build_plan(6, 60, database))


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"])
def test_a_minute_has_every_kind_of_fault_and_action(database: str) -> None:
    plan = build_plan(5, 60, database)
    faults = {(fault.kind, fault.target.partition("-")[0]) for fault in plan.faults}
    for expected in (("kill", "web"), ("kill", "maintenance"), ("freeze", "maintenance"), ("freeze", "broker")):
        assert expected in faults
    kinds = ("crash", "kill", "freeze", "freeze at", "term", "flush", "stop", "drop", "refuse", "outage")
    assert {kind for kind, _ in faults} == {*kinds}
    assert ("stop", "provider") in faults
    assert (("kill", "database") in faults) == (database != "sqlite")
    assert {action.kind for action in plan.actions} == {"create", "repeat", "cancel", "retry"}


def test_about_every_second_job_asks_a_server_and_each_of_its_steps_is_one_that_there_is() -> None:
    creates = [action.create for action in build_plan(5, 600, "sqlite").actions if action.kind == "create"]
    served = [create for create in creates if create.is_served]
    assert 0.4 < len(served) / len(creates) < 0.6
    assert {answer for create in served for answer in create.script.answers} == set(STEPS)
