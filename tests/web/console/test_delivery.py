"""The strip of a job's stages, the reason why it waits, and its attempts, from real jobs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from aijobs.clock import utc_now
from aijobs.monitor.views import JobDetail
from aijobs.outbox.models import OutboxEvent
from aijobs.web.console.attempts import build_attempts
from aijobs.web.console.strip import build_strip
from aijobs.web.console.times import ago, duration
from tests.web.console.stage import Stage

GRACE = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def _english(stage: Stage) -> Iterator[None]:
    with stage.app.test_request_context(headers={"Accept-Language": "en"}):
        yield


def _detail(stage: Stage, job_id: str) -> JobDetail:
    return stage.services.monitor.get_detail(job_id)


def _steps(stage: Stage, job_id: str) -> list[str]:
    return [station.step for station in build_strip(_detail(stage, job_id), None, GRACE)]


def _wait(stage: Stage, job_id: str) -> str | None:
    wait = stage.services.monitor.find_wait(_detail(stage, job_id))
    return wait.reason if wait else None


def _set_event(stage: Stage, job_id: str, **values: Any) -> None:
    with stage.services.database.transaction() as session:
        session.execute(update(OutboxEvent).where(OutboxEvent.aggregate_id == job_id).values(**values))


def test_strip_of_a_succeeded_job_is_done(stage: Stage) -> None:
    assert _steps(stage, stage.succeeded()) == ["done", "done", "done", "done", "skipped", "done"]


def test_strip_shows_the_end_of_a_failed_or_cancelled_job(stage: Stage) -> None:
    assert _steps(stage, stage.failed())[-1] == "failed"
    cancelled = _steps(stage, stage.cancelled())
    assert cancelled[-1] == "stopped"
    assert cancelled[3] == "skipped"


def test_strip_of_a_job_cancelled_before_dispatch_skips_outbox_and_broker(stage: Stage) -> None:
    job_id = stage.create()
    _set_event(stage, job_id, status="pending", published_at=None, last_sent_at=None)
    stage.services.jobs.cancel(job_id, "user:u1")
    assert _steps(stage, job_id) == ["done", "skipped", "skipped", "skipped", "skipped", "stopped"]
    assert _detail(stage, job_id).job.queued_at is None


def test_strip_moves_from_outbox_to_broker_to_worker(stage: Stage) -> None:
    job_id = stage.create()
    _set_event(stage, job_id, status="pending", published_at=None, last_sent_at=None, available_at=utc_now())
    assert _steps(stage, job_id) == ["done", "now", "ahead", "ahead", "ahead", "ahead"]
    stage.deliver(job_id)
    assert _steps(stage, job_id) == ["done", "done", "now", "ahead", "ahead", "ahead"]
    stage.services.lifecycle.lock_job(job_id, str(stage.instance))
    assert _steps(stage, job_id) == ["done", "done", "done", "now", "ahead", "ahead"]


def test_strip_marks_the_stage_where_a_job_is_late(stage: Stage) -> None:
    long_ago = utc_now() - timedelta(minutes=10)
    unsent, unpopped, abandoned = stage.create(), stage.queued(), stage.running()
    _set_event(stage, unsent, status="pending", published_at=None, last_sent_at=None, available_at=long_ago)
    assert _steps(stage, unsent)[1] == "gap"
    stage.set_job(unpopped, created_at=long_ago)
    _set_event(stage, unpopped, last_sent_at=long_ago, published_at=long_ago, available_at=long_ago)
    assert _steps(stage, unpopped)[2] == "gap"
    stage.set_job(abandoned, lock_until=long_ago)
    assert _steps(stage, abandoned)[3] == "gap"
    assert _wait(stage, abandoned) == "lease_expired"


def test_strip_of_a_retry_waits_at_the_outbox(stage: Stage) -> None:
    job_id = stage.retrying()
    _set_event(stage, job_id, available_at=utc_now() + timedelta(minutes=5))
    assert _steps(stage, job_id)[1:4] == ["now", "ahead", "ahead"]


def test_times_on_the_strip_are_never_negative(stage: Stage) -> None:
    for job_id in stage.each_phase().values():
        for station in build_strip(_detail(stage, job_id), None, GRACE):
            assert station.took is None or station.took >= timedelta(0)


def test_reason_for_the_wait_is_the_first_obstacle(stage: Stage) -> None:
    job_id = stage.create()
    _set_event(stage, job_id, last_sent_at=None)
    stage.presence.beat()
    assert _wait(stage, job_id) == "not_sent"
    stage.deliver(job_id)
    assert _wait(stage, job_id) == "in_line"
    stage.presence.leave()
    assert _wait(stage, job_id) == "no_worker"
    stage.set_job(job_id, next_attempt_at=utc_now() + timedelta(minutes=5))
    assert _wait(stage, job_id) == "not_due"
    stage.pause("ai-interactive", "maintenance")
    assert _wait(stage, job_id) == "paused"


def test_ended_job_waits_for_nothing(stage: Stage) -> None:
    assert _wait(stage, stage.succeeded()) is None
    assert _wait(stage, stage.running()) == "running"
    assert _wait(stage, stage.cancel_requested()) == "cancelling"


def test_each_attempt_is_shown_with_its_end(stage: Stage) -> None:
    job_id = stage.create({"raise": "PROVIDER_UNAVAILABLE"}, {"output": {}, "artifacts": 1})
    stage.run(job_id)
    stage.run(job_id)
    attempts = build_attempts(_detail(stage, job_id))
    assert [(each.number, each.end, each.error_code) for each in attempts] == [
        (1, "retry_scheduled", "PROVIDER_UNAVAILABLE"),
        (2, "succeeded", None),
    ]
    assert all(each.took is not None and each.took >= timedelta(0) for each in attempts)


def test_running_attempt_has_no_end(stage: Stage) -> None:
    (attempt,) = build_attempts(_detail(stage, stage.running()))
    assert (attempt.end, attempt.took) == (None, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "just now"), (59.9, "59s ago"), (60, "1m ago"), (3599, "59m ago"), (7200, "2h ago"), (90_000, "1d ago")],
)
def test_age_is_shown_in_its_largest_whole_unit(seconds: float, text: str) -> None:
    now = utc_now()
    assert ago(now - timedelta(seconds=seconds), now) == text


def test_future_time_is_shown_as_such_unless_the_difference_is_small() -> None:
    now = utc_now()
    assert ago(now + timedelta(minutes=3), now) == "in 3m"
    assert ago(now + timedelta(milliseconds=400), now) == "just now"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0124, "12 ms"),
        (4.23, "4.2 s"),
        (42, "42 s"),
        (200, "3 min 20 s"),
        (9000, "2 h 30 min"),
        (1e6, "11 d 13 h"),
    ],
)
def test_duration_has_two_significant_figures(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
