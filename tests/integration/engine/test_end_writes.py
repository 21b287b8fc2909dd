"""Ends of attempts whose first write fails because the database is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from aijobs.ai.billing.usage import UsageLog
from aijobs.errors import JobError
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from tests.integration.engine.stage import CARDS, Stage


def away() -> OperationalError:
    """Return SQLAlchemy's error for an unreachable database."""
    return OperationalError("UPDATE", {}, ConnectionRefusedError("refused"))


@contextmanager
def failing_once(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make a method raise in its first call."""
    original: Callable[..., Any] = getattr(owner, name)
    calls: list[str] = []

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise away()
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, method)
        yield calls


@pytest.mark.parametrize(
    ("owner", "name"), [(LifecycleRepository, "release_for_retry"), (UsageLog, "close")], ids=["job", "usage row"]
)
def test_retryable_error_is_retried_if_its_first_write_fails(
    stage: Stage, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = stage.new_cards(stage.asking(JobError("PROVIDER_UNAVAILABLE", "503"), CARDS))

    with failing_once(owner, name, monkeypatch):
        stage.run(job_id)

    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.retry_count, job.error_code) == ("running", 1, None)
    (first,) = stage.usage(job_id)
    assert (first["state"], first["error_code"]) == ("failed", "PROVIDER_UNAVAILABLE")
    assert stage.run_to_end(job_id).lifecycle_status == "succeeded"


def test_job_ends_and_its_usage_row_is_lost_if_the_row_cannot_be_closed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = stage.new_cards(stage.asking(JobError("CONTENT_SAFETY_BLOCKED", "no")))

    def close(*_: Any) -> None:
        raise away()

    monkeypatch.setattr(UsageLog, "close", close)
    stage.run(job_id)

    job = stage.kit.job(job_id)
    assert (job.lifecycle_status, job.error_code) == ("failed", "CONTENT_SAFETY_BLOCKED")
    (row,) = stage.usage(job_id)
    assert (row["state"], row["billed"]) == ("lost", "unknown")


def test_cancelled_attempt_ends_cancelled_if_its_first_write_fails(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled_meanwhile(_request: Any, _token: Any) -> str:
        stage.kit.jobs.cancel(job_id, "user:u1")
        raise JobError("PROVIDER_UNAVAILABLE", "503")

    job_id = stage.new_cards(stage.asking(cancelled_meanwhile))
    with failing_once(UsageLog, "close", monkeypatch):
        stage.run(job_id)

    assert stage.kit.job(job_id).lifecycle_status == "cancelled"
    assert [row["state"] for row in stage.usage(job_id)] == ["failed"]
