"""Chaos runs with fixed seeds, the same as `make chaos`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.chaos.__main__ import EXIT_MISSING
from tests.support.processes import Processes
from tests.support.servers import ServerMissing, skip_or_fail

ROOT = Path(__file__).parents[2]


def play(processes: Processes, *options: str, timeout: float) -> str:
    """Perform one run in its own process, because it changes `sys.path`. Return its summary."""
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
def test_minute_of_chaos_breaks_no_promise_on_any_database(processes: Processes, database: str) -> None:
    play(processes, "--database", database, "--seed", "20", "--seconds", "60", timeout=350)
