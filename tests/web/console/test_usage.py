"""Usage and cost in the console, and jobs that wait for their providers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from jinja2 import FileSystemBytecodeCache

from aijobs.ai.calling.breaker import scope_of
from aijobs.clock import utc_now
from aijobs.job_types.flashcard_generation import SAMPLE_INPUT
from aijobs.jobs.lease import lease_of
from aijobs.jobs.requests import CreateJobInput
from aijobs.queues.message import JobMessage
from aijobs.settings import Settings
from aijobs.web.factory import create_app
from aijobs.wiring.services import build_services
from tests.support.rows import add, build_call, build_job, ended
from tests.web.console.stage import Stage, parse, prepare

PAGE = "/console/usage"
UNPRICED = {"cost_micros": None, "currency": None}


@pytest.fixture
def stage(
    create_sqlite_database: Callable[..., str],
    redis_url: str,
    tmp_path: Path,
    compiled_templates: FileSystemBytecodeCache,
) -> Iterator[Stage]:
    """The console of a platform with a DeepSeek key."""
    services = build_services(
        Settings.load(
            {
                "AIJOBS_DATABASE_URL": create_sqlite_database(prepare),
                "AIJOBS_REDIS_URL": redis_url,
                "AIJOBS_INSTANCE_PATH": str(tmp_path),
                "DEEPSEEK_API_KEY": "k-canary-0123456789",
            }
        )
    )
    app = create_app(services=services)
    app.testing = True
    app.jinja_env.bytecode_cache = compiled_templates
    yield Stage(services, app)
    services.database.engine.dispose()


@pytest.fixture
def calls(stage: Stage) -> Any:
    """Add a failed job of ana with all kinds of calls, its retry, and a job of bo yesterday."""
    now = utc_now()
    first = build_job(user_id="ana", **ended("failed"))
    retry = build_job(user_id="ana", parent_job_id=first.id, root_id=first.id, **ended("succeeded"))
    other = build_job(user_id="bo", job_type="other_type", **ended("succeeded"))
    lost = {"state": "lost", "billed": "unknown", "prompt_tokens": None, "completion_tokens": None, **UNPRICED}
    limited = {**lost, "state": "failed", "billed": "no", "error_code": "PROVIDER_RATE_LIMITED", "http_status": 429}
    add(
        stage.services.database,
        *(first, retry, other),
        build_call(first, started_at=now, cost_micros=1234, cached_tokens=4, estimated=True, request_id="req-<b>1"),
        build_call(first, call_no=2, started_at=now, **UNPRICED),
        build_call(first, call_no=3, started_at=now, **lost),
        build_call(first, call_no=4, started_at=now, **limited),
        build_call(retry, started_at=now, cost_micros=1_000_000, prompt_tokens=2000),
        build_call(other, started_at=now - timedelta(days=1), cost_micros=50),
    )
    return first


def _cells(row: Any) -> list[str]:
    return [" ".join(cell.get_text(" ").split()) for cell in row.find_all(["th", "td"])]


def _rows(soup: Any) -> list[list[str]]:
    return [_cells(row) for row in soup.select("#usage-sums tbody tr, #usage-sums tfoot tr")]


def test_usage_page_shows_sums_by_day_and_in_total(stage: Stage, calls: Any) -> None:
    today = utc_now().date()
    rows = _rows(stage.client().soup(PAGE))
    assert rows == [
        [str(today), "5", "2 1 lost", "≈ estimated 2,020 4 cached", "15", "$1.001234 2 unpriced 1 possibly billed"],
        [str(today - timedelta(days=1)), "1", "0", "10", "5", "$0.00005"],
        ["Total", "6", "2 1 lost", "≈ estimated 2,030 4 cached", "20", "$1.001284 2 unpriced 1 possibly billed"],
    ]


def test_usage_filter_and_group_work_without_javascript(stage: Stage, calls: Any) -> None:
    console = stage.client()
    assert [row[0] for row in _rows(console.soup(f"{PAGE}?groupBy=user"))] == ["ana", "bo", "Total"]
    assert [row[0] for row in _rows(console.soup(f"{PAGE}?groupBy=jobType&userId=bo"))] == ["other_type", "Total"]
    assert [row[-1] for row in _rows(console.soup(f"{PAGE}?jobType=other_type"))] == ["$0.00005"] * 2
    form = console.soup(PAGE).find("form", class_="filters")
    assert (form["method"], form["action"]) == ("get", PAGE)
    day = console.soup(PAGE).select_one("#usage-sums tbody a")["href"]
    assert [row[0] for row in _rows(console.soup(day))] == ["ana", "Total"]
    assert not console.soup(f"{PAGE}?userId=nobody").select("#usage-sums table")


def test_usage_fragments_equal_the_page_and_keep_the_filter(stage: Stage, calls: Any) -> None:
    console = stage.client()
    page = console.soup(f"{PAGE}?userId=ana&groupBy=model")
    fragment = parse(console.get(f"{PAGE}?userId=ana&groupBy=model", **{"HX-Request": "true"}))
    assert fragment.find("html") is None
    assert _rows(fragment) == _rows(page)
    polled = parse(console.get(page.find(id="poller")["hx-get"], **{"HX-Request": "true"}))
    assert polled.find(id="usage-sums")["hx-swap-oob"] == "true"
    assert polled.find("form") is None
    assert _rows(polled) == _rows(page)


def test_invalid_usage_filter_is_named_and_not_polled(stage: Stage) -> None:
    answer = stage.client().get(f"{PAGE}?from=nonsense&groupBy=hour")
    assert answer.status_code == 422
    soup = parse(answer)
    assert {field["name"] for field in soup.find_all(attrs={"aria-invalid": "true"})} == {"from", "groupBy"}
    assert "data-poll" not in soup.find(id="poller").attrs


def test_usage_requires_its_permission(stage: Stage, calls: Any) -> None:
    viewer = stage.client("VIEWER")
    assert viewer.get(PAGE).status_code == 403
    assert viewer.get(f"{PAGE}/changes").status_code == 403
    assert viewer.soup("/console/jobs").find("a", href=PAGE) is None
    assert stage.client().soup("/console/jobs").find("a", href=PAGE)
    text = viewer.soup(f"/console/jobs/{calls.id}").find(id="job-calls").get_text(" ")
    assert "HTTP 429" in text
    assert not [word for word in ("$", "cached", "unpriced", "billed") if word in text]


def test_calls_of_a_job_show_status_request_price_and_possible_billing(stage: Stage, calls: Any) -> None:
    soup = stage.client().soup(f"/console/jobs/{calls.id}")
    card = soup.find(id="job-calls")
    priced, unpriced, lost, limited = (_cells(row) for row in card.select("tbody tr"))
    assert priced[3:] == ["≈ estimated 10 / 5 4 cached", "$0.001234 billed"]
    assert "req-<b>1" in priced[2]
    assert unpriced[4] == "? no price is known billed"
    assert lost[3:] == ["–", "? no price is known possibly billed"]
    assert limited[4] == "– not billed"
    assert "HTTP 429" in limited[1]
    own, chain = (_cells(row) for row in card.select("tfoot tr"))
    assert own == [
        "This job 4 calls, 2 failed, 1 lost",
        "≈ estimated 20 / 10 4 cached",
        "$0.001234 2 unpriced 1 possibly billed",
    ]
    assert chain[1:] == ["≈ estimated 2,020 / 15 4 cached", "$1.001234 2 unpriced 1 possibly billed"]
    for mark in card.select(".mark"):
        assert mark.find(attrs={"aria-hidden": "true"})
        assert mark.find(class_="visually-hidden").get_text() == mark["title"]


# --- jobs without an available provider ---------------------------------------------------------------------


def _cards(stage: Stage) -> str:
    """Create a flashcard job and deliver its message; return its id."""
    request = CreateJobInput("ana", "flashcard_generation", "note", "n1", SAMPLE_INPUT)
    job_id = stage.services.jobs.create_job(request).job.id
    stage.deliver(job_id)
    return job_id


def _postponed(stage: Stage) -> str:
    """Make a flashcard job postponed because DeepSeek's account is exhausted; return its id."""
    job_id = _cards(stage)
    stage.services.breaker.failed(scope_of("deepseek"), exhausted=True, code="PROVIDER_ACCOUNT_EXHAUSTED")
    message = JobMessage(job_id, "flashcard_generation", "0" * 64, "2026-01-01T00:00:00.000000Z")
    assert stage.engine.execute(message) == "postponed"
    return job_id


def _waiting(stage: Stage, job_id: str) -> Any:
    return stage.client().get(f"/admin-api/ai/jobs/{job_id}").json.get("waiting")


def test_page_of_a_postponed_job_names_the_open_breakers(stage: Stage) -> None:
    job_id = _postponed(stage)
    assert stage.job(job_id).retry_count == 0
    why = stage.client().soup(f"/console/jobs/{job_id}").find(id="job-why")
    assert "the breakers of all its providers are open" in why.get_text()
    assert why.find(attrs={"data-state": "open"})
    assert "PROVIDER_ACCOUNT_EXHAUSTED" in why.get_text()
    assert why.find("a", href="/console/providers").get_text() == "deepseek"
    waiting = _waiting(stage, job_id)
    assert (waiting["reason"], [b["scope"] for b in waiting["breakers"]]) == ("breaker_open", ["deepseek.platform"])
    assert waiting["until"] > waiting["breakers"][0]["since"]
    assert "PROVIDER_ACCOUNT_EXHAUSTED" == waiting["breakers"][0]["why"]


def test_job_stays_postponed_after_its_breaker_is_closed(stage: Stage) -> None:
    job_id = _postponed(stage)
    stage.services.breaker.reset(scope_of("deepseek"))
    assert _waiting(stage, job_id)["reason"] == "providers_busy"
    stage.set_job(job_id, next_attempt_at=utc_now() - timedelta(seconds=1))
    assert _waiting(stage, job_id)["reason"] != "providers_busy"


def test_breaker_of_another_key_is_no_reason_to_wait(stage: Stage) -> None:
    stage.services.breaker.failed(scope_of("deepseek", "somebody"), exhausted=True)
    job_id = _postponed(stage)
    stage.services.breaker.reset(scope_of("deepseek"))
    assert _waiting(stage, job_id)["reason"] == "providers_busy"


def test_retried_job_waits_for_its_time_and_not_for_a_provider(stage: Stage) -> None:
    stage.services.breaker.failed(scope_of("deepseek"), exhausted=True)
    assert _waiting(stage, stage.retrying())["reason"] == "not_due"


def test_released_job_waits_for_no_provider(stage: Stage) -> None:
    job_id = _cards(stage)
    stage.services.breaker.failed(scope_of("deepseek"), exhausted=True)
    locked = stage.services.lifecycle.lock_job(job_id, str(stage.instance)).job
    stage.services.lifecycle.release(lease_of(locked))
    assert _waiting(stage, job_id)["reason"] not in ("breaker_open", "providers_busy", "not_due")
    assert _waiting(stage, stage.succeeded()) is None
