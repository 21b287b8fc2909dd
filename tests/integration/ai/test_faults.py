"""The table of docs/faults.md, row by row, over a real socket."""

from __future__ import annotations

from typing import Any

import pytest

from aijobs.errors import CODES
from aijobs.testing.fakellm import faults
from tests.contracts import documents
from tests.integration.ai.conftest import LiveOpener

TABLE = {row[0].strip("`"): row for row in documents.rows(documents.read("docs/faults.md")) if row[0].startswith("`")}
QUICKER: dict[str, dict[str, Any]] = {"keep-alive-answer": {"every_s": 0.02}, "huge": {"megabytes": 1.2}}
"""Parameters that make a step as short as the limits of these tests."""
LIMITS: dict[str, dict[str, float]] = {
    "hang": {"first_data_s": 0.6},
    "hang-after-headers": {"first_data_s": 0.6},
    "keep-alive": {"first_data_s": 0.6},
    "stall": {"idle_s": 0.5},
}
"""What a fault runs into. The others have time, whatever else this machine does."""
NOT_AN_END = {"status", "drip"}
"""What is no fault by itself: a frame for others, and slowness."""


def test_every_fault_is_in_the_table() -> None:
    assert set(TABLE) == set(faults.FAULTS) - NOT_AN_END


@pytest.mark.parametrize("name", TABLE)
def test_a_fault_comes_to_what_the_table_says(open_live: LiveOpener, name: str) -> None:
    live = open_live(**LIMITS.get(name, {}))
    _, ends_with, calls, billed, _ = TABLE[name]
    job = live.run(faults.build(name, QUICKER.get(name)))
    assert (job.error_code or job.lifecycle_status) == ends_with
    assert len(live.llm.calls) == int(calls)
    rows = live.stage.usage(job.id)
    assert len(rows) == int(calls), "each call has its row"
    assert all(row["finished_at"] is not None for row in rows)
    told = [row["billed"] for row in rows]
    assert told == (billed.split(", ") if ", " in billed else [billed] * len(rows))
    if job.error_code is not None:
        assert job.public_error_message == CODES[job.error_code].en
        assert not live.stage.kit.rows("flashcards", job_id=job.id)
