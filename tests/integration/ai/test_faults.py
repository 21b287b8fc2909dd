"""Each row of the table in docs/faults.md, over a real socket."""

from __future__ import annotations

from typing import Any

import pytest

from aijobs.engine.token import TIMEOUT
from aijobs.errors import CODES
from aijobs.jobs.models import AiJob
from aijobs.testing.fakellm import Step, faults
from tests.contracts import documents
from tests.integration.ai.conftest import Live, LiveOpener
from tests.support.jobs import BEGIN

TABLE = {row[0].strip("`"): row for row in documents.rows(documents.read("docs/faults.md")) if row[0].startswith("`")}
QUICKER: dict[str, dict[str, Any]] = {"keep-alive-answer": {"every_s": 0.02}, "huge": {"megabytes": 1.2}}
"""Parameters that shorten a step to the limits of these tests."""
NEVER_END = {"hang", "hang-after-headers", "keep-alive", "stall"}
"""Faults that only the attempt's deadline ends. The tests set it off once the server has the call."""
NOT_AN_END = {"status", "drip"}
"""Steps that are no faults by themselves."""


def test_every_fault_is_documented() -> None:
    assert set(TABLE) == set(faults.FAULTS) - NOT_AN_END


@pytest.mark.parametrize("name", TABLE)
def test_fault_has_the_documented_result(open_live: LiveOpener, name: str) -> None:
    live = open_live()
    _, ends_with, calls, billed, _ = TABLE[name]
    step = faults.build(name, QUICKER.get(name))
    job = run_out_of_time(live, step, int(calls)) if name in NEVER_END else live.run(step)
    assert (job.error_code or job.lifecycle_status) == ends_with
    assert len(live.llm.calls) == int(calls)
    rows = live.stage.usage(job.id)
    assert len(rows) == int(calls), "each call has its usage row"
    assert all(row["finished_at"] is not None for row in rows)
    recorded = [row["billed"] for row in rows]
    assert recorded == (billed.split(", ") if ", " in billed else [billed] * len(rows))
    if job.error_code is not None:
        assert job.public_error_message == CODES[job.error_code].en
        assert not live.stage.kit.rows("flashcards", job_id=job.id)


def run_out_of_time(live: Live, step: Step, attempts: int) -> AiJob:
    """Run a job whose attempts each reach their deadline once the server has their call."""
    live.llm.script(step)
    job_id = live.new()
    for number in range(1, attempts + 1):
        delivery = live.stage.start(job_id)
        live.llm.wait_for_calls(number)
        (run,) = [run for run in live.stage.active.all() if run.lease.attempt_no == number]
        live.stage.watcher.stop(run, TIMEOUT)
        delivery.wait()
        live.llm.wait_until_left(number)
        job = live.stage.kit.job(job_id)
        live.stage.kit.clock.at = max(live.stage.kit.clock.at, job.next_attempt_at or BEGIN)
    return job
