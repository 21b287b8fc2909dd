"""The benchmarks run as documented, and fail if a job was lost or done twice, or a call too many was made."""

from __future__ import annotations

import json
import sys

import pytest

from bench import providers
from bench.reliability import Outcome, table
from tests.contracts.sources import ROOT
from tests.support.processes import Processes


@pytest.mark.long
def test_killed_worker_of_a_benchmark_loses_and_doubles_no_job(processes: Processes) -> None:
    options = ("--database", "sqlite", "--run", "kill", "--jobs", "20", "--json")
    program = processes.spawn([sys.executable, "-m", "bench.reliability", *options], cwd=ROOT)
    assert program.wait(100) == 0, program.output
    report = json.loads(program.output[program.output.index("{") :])
    (outcome,) = report["outcomes"]
    assert report["is_sound"]
    assert (outcome["done"], outcome["lost"], outcome["results_twice"], outcome["broken"]) == (20, 0, 0, [])
    assert 8 <= outcome["details"]["done_at_the_kill"] < 20


@pytest.mark.parametrize("fault", [{"lost": 1}, {"results_twice": 1}, {"broken": ["promise 5: 1 x has a lease"]}])
def test_lost_or_doubled_job_fails_the_benchmark(fault: dict[str, object]) -> None:
    outcome = Outcome("sqlite", "kill", 10, done=10)
    assert outcome.is_sound
    for name, value in fault.items():
        setattr(outcome, name, value)
    assert not outcome.is_sound
    assert ("broken" in table([outcome])) == ("broken" in fault)


@pytest.mark.long
def test_server_that_loses_each_first_answer_is_called_twice_per_job(processes: Processes) -> None:
    options = ("--run", "lost answer", "--jobs", "8", "--json")
    program = processes.spawn([sys.executable, "-m", "bench.providers", *options], cwd=ROOT)
    assert program.wait(100) == 0, program.output
    (figures,) = json.loads(program.output[program.output.index("{") :])["figures"]
    assert (figures["jobs"], figures["done"], figures["calls"], figures["ratio"]) == (4, 4, 8, 2.0)
    assert figures["details"] == {"rows_billed": 4, "possibly_billed": 4}


@pytest.mark.parametrize("fault", [{"done": 9}, {"calls": 11}, {"calls": 9}, {"broken": ["promise 8: 1 x a call"]}])
def test_lost_job_or_surplus_call_fails_the_benchmark(fault: dict[str, object]) -> None:
    figures = providers.Figures("server", 1, 10, done=10, calls=10, wanted_calls=10)
    assert figures.is_sound
    assert "broken" not in providers.table([figures])
    for name, value in fault.items():
        setattr(figures, name, value)
    assert not figures.is_sound
    assert "broken" in providers.table([figures])
