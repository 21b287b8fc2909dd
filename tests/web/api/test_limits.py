"""Answers to a user who has reached a limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient

from aijobs.clock import parse_iso, utc_now
from aijobs.job_types import flashcard_generation
from aijobs.settings import Settings
from aijobs.web.factory import create_app
from aijobs.wiring.services import build_services
from tests.web.api.conftest import as_user


@pytest.fixture
def client(settings: Settings) -> Iterator[FlaskClient]:
    services = build_services(replace(settings, user_active_jobs=2, quota_month_jobs=3))
    yield create_app(services=services).test_client()
    services.database.dispose()
    services.broker.client.close()


def ask(client: FlaskClient, key: str, language: str = "en") -> Any:
    headers = {**as_user(), "Idempotency-Key": key, "Accept-Language": language}
    return client.post("/api/learning/flashcards", json=flashcard_generation.SAMPLE_INPUT, headers=headers)


def next_month(at: datetime) -> datetime:
    first = at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first + timedelta(days=32)).replace(day=1)


def test_reached_limit_is_named_with_usage_and_retry_after(client: FlaskClient) -> None:
    first = ask(client, "k1").get_json()
    ask(client, "k2")
    answer = ask(client, "k3")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "5")
    error = answer.get_json()["error"]
    assert (error["code"], error["details"]) == (
        "TOO_MANY_JOBS",
        {"limit": "userActiveJobs", "used": 2, "allowed": 2},
    )
    assert ask(client, "k1").status_code == 200, "a repeat of a used key is answered before any limit is checked"

    running = first["jobId"]
    assert client.post(f"/api/ai/jobs/{running}/cancel", headers=as_user()).status_code == 200
    assert ask(client, "k3").status_code == 202
    other = ask(client, "k3").get_json()["jobId"]
    client.post(f"/api/ai/jobs/{other}/cancel", headers=as_user())
    assert ask(client, "k4").status_code == 202, "two jobs that were cancelled before any cost aren't counted"


def test_exceeded_quota_names_its_period_and_reset_time(settings: Settings) -> None:
    services = build_services(replace(settings, quota_month_jobs=1))
    client = create_app(services=services).test_client()
    assert ask(client, "k1").status_code == 202
    answer = ask(client, "k2", "zh")
    now = utc_now()
    services.database.dispose()
    services.broker.client.close()
    error = answer.get_json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (429, "QUOTA_EXCEEDED", "该请求会超出您的额度。")
    details = error["details"]
    assert (details["limit"], details["period"]) == ("quotaMonthJobs", "month")
    assert (details["used"], details["needed"], details["allowed"]) == (1, 1, 1)
    resets = parse_iso(details["resetsAt"])
    assert resets in (next_month(now), next_month(now - timedelta(minutes=1)))
    assert abs(int(answer.headers["Retry-After"]) - (resets - now).total_seconds()) < 60
