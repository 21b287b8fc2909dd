"""A job's history: rows numbered without a gap."""

from __future__ import annotations

import pytest

from tests.support.jobs import Kit

LIVES = {
    "queued": ["created"],
    "running": ["created", "locked"],
    "retrying": ["created", "locked", "released"],
    "succeeded": ["created", "locked", "succeeded"],
    "failed": ["created", "locked", "failed"],
    "cancelled": ["created", "locked", "cancel_requested", "cancelled"],
    "cancelled_waiting": ["created", "cancel_requested", "cancelled"],
    "cancel_requested": ["created", "locked", "cancel_requested"],
}


@pytest.mark.parametrize("state", LIVES)
def test_history_has_one_row_for_each_change(kit: Kit, state: str) -> None:
    job_id, _ = kit.job_in(state)
    assert kit.types(job_id) == LIVES[state]
