"""The measurement of reliability runs as it is documented, and would say so if a job were lost or done twice."""

from __future__ import annotations

import json
import sys

import pytest

from bench.reliability import Outcome, table
from tests.contracts.sources import ROOT
from tests.support.processes import Processes


def test_a_worker_killed_in_mid_run_loses_no_job_and_doubles_none(processes: Processes) -> None:
    options = ("--database", "sqlite", "--run", "kill", "--jobs", "20", "--json")
    program = processes.spawn([sys.executable, "-m", "bench.reliability", *options], cwd=ROOT)
    assert program.wait(100) == 0, program.output
    report = json.loads(program.output[program.output.index("{") :])
    (outcome,) = report["outcomes"]
    assert report["is_sound"]
    assert (outcome["done"], outcome["lost"], outcome["results_twice"], outcome["broken"]) == (20, 0, 0, [])
    assert 8 <= outcome["details"]["done_at_the_kill"] < 20


@pytest.mark.parametrize("fault", [{"lost": 1}, {"results_twice": 1}, {"broken": ["promise 5: 1 x has a lease"]}])
def test_a_lost_or_doubled_job_is_said_and_no_success(fault: dict[str, object]) -> None:
    outcome = Outcome("sqlite", "kill", 10, done=10)
    assert outcome.is_sound
    for name, value in fault.items():
        setattr(outcome, name, value)
    assert not outcome.is_sound
    assert ("broken" in table([outcome])) == ("broken" in fault)
