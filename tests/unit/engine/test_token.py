"""How an attempt learns that it must stop."""

from __future__ import annotations

import threading

import pytest

from aijobs.engine.token import CANCELLED, LOST, TIMEOUT, CancellationToken
from aijobs.errors import JobError


def test_the_deadline_is_a_reason_by_itself() -> None:
    token = CancellationToken(0.0)
    assert token.reason == TIMEOUT
    assert token.remaining() == 0
    with pytest.raises(JobError) as stopped:
        token.raise_if_cancelled()
    assert stopped.value.code == TIMEOUT


def test_the_first_reason_stands() -> None:
    token = CancellationToken(60)
    token.cancel(CANCELLED)
    token.cancel(LOST)
    assert token.reason == CANCELLED


def test_a_sleep_ends_as_soon_as_the_attempt_must_stop() -> None:
    token = CancellationToken(600)
    threading.Timer(0.05, token.cancel, [CANCELLED]).start()
    with pytest.raises(JobError) as stopped:
        token.sleep(600)  # Longer than a test may take.
    assert stopped.value.code == CANCELLED


def test_a_sleep_never_passes_the_deadline() -> None:
    with pytest.raises(JobError) as stopped:
        CancellationToken(0.05).sleep(30)
    assert stopped.value.code == TIMEOUT


def test_a_sleep_within_the_deadline_just_ends() -> None:
    token = CancellationToken(60)
    token.sleep(0.01)
    assert token.reason is None


def test_who_waits_to_abort_a_call_is_told_once_and_at_once_where_it_is_late() -> None:
    token, told = CancellationToken(60), []
    token.on_cancel(lambda: told.append("before"))
    token.cancel(CANCELLED)
    token.cancel(CANCELLED)
    token.on_cancel(lambda: told.append("after"))
    assert told == ["before", "after"]
