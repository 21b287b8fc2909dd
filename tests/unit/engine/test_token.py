"""The cancellation token of an attempt."""

from __future__ import annotations

import threading

import pytest

from aijobs.engine.token import CANCELLED, LOST, TIMEOUT, CancellationToken
from aijobs.errors import JobError


def test_token_is_cancelled_after_its_deadline() -> None:
    token = CancellationToken(0.0)
    assert token.reason == TIMEOUT
    assert token.remaining() == 0
    with pytest.raises(JobError) as stopped:
        token.raise_if_cancelled()
    assert stopped.value.code == TIMEOUT


def test_first_reason_is_kept() -> None:
    token = CancellationToken(60)
    token.cancel(CANCELLED)
    token.cancel(LOST)
    assert token.reason == CANCELLED


def test_sleep_ends_when_the_attempt_is_cancelled() -> None:
    token = CancellationToken(600)
    threading.Timer(0.05, token.cancel, [CANCELLED]).start()
    with pytest.raises(JobError) as stopped:
        token.sleep(600)  # Longer than a test may take.
    assert stopped.value.code == CANCELLED


def test_sleep_ends_at_the_deadline() -> None:
    with pytest.raises(JobError) as stopped:
        CancellationToken(0.05).sleep(30)
    assert stopped.value.code == TIMEOUT


def test_sleep_within_the_deadline_returns() -> None:
    token = CancellationToken(60)
    token.sleep(0.01)
    assert token.reason is None


def test_cancel_callback_runs_once_or_at_once_if_it_is_late() -> None:
    token, called = CancellationToken(60), []
    token.on_cancel(lambda: called.append("before"))
    token.cancel(CANCELLED)
    token.cancel(CANCELLED)
    token.on_cancel(lambda: called.append("after"))
    assert called == ["before", "after"]
