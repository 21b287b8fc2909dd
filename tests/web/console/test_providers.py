"""The providers page: breaker states, permissions, and secrets that it never shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from jinja2 import FileSystemBytecodeCache
from sqlalchemy import select

from aijobs.ai.calling.breaker import scope_of
from aijobs.ai.provider import Route
from aijobs.operators.models import AuditLog
from aijobs.settings import Settings
from aijobs.web.factory import create_app
from aijobs.wiring.services import build_services
from tests.support.rows import add, build_call
from tests.support.servers import ValkeyServer
from tests.web.console.stage import Stage, parse, prepare

KEY = "sk-canary-0123456789"
PAGE = "/console/providers"
CLOSE = "/console/providers/deepseek/close"
SCOPE = scope_of("deepseek")


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
                "DEEPSEEK_API_KEY": KEY,
            }
        )
    )
    app = create_app(services=services)
    app.testing = True
    app.jinja_env.bytecode_cache = compiled_templates
    yield Stage(services, app)
    services.database.engine.dispose()


def _audit(stage: Stage) -> list[AuditLog]:
    with stage.services.database.read() as session:
        return list(session.scalars(select(AuditLog).where(AuditLog.action == "provider.close_breaker")))


def _word(stage: Stage) -> str:
    return stage.services.breaker.states([SCOPE])[0].word


def test_page_and_fragment_show_the_same_breakers_and_no_key(stage: Stage) -> None:
    console = stage.client("SUPER_ADMIN")
    soup = console.soup(PAGE)
    assert soup.find(id="p-deepseek").parent.find(attrs={"data-state": "closed"})
    assert "api.deepseek.com" in soup.get_text()
    stage.services.breaker.failed(SCOPE, exhausted=True)
    page = console.get(PAGE)
    fragment = console.get(PAGE, **{"HX-Request": "true"})
    for answer in (page, fragment):
        card = parse(answer).find(id="p-deepseek").find_parent("section")
        assert card.find(attrs={"data-state": "open"})
        assert "PROVIDER_ACCOUNT_EXHAUSTED" in card.get_text()
        assert "The next probe is in" in card.get_text()
        assert KEY not in answer.text
    assert parse(page).find("html")
    assert not parse(fragment).find("html")
    assert parse(fragment).find(id="providers")["hx-swap-oob"] == "true"


@pytest.mark.parametrize(("language", "closed"), [("en", "Breaker closed"), ("zh", "断路器接通")])
def test_closed_breaker_is_labelled_as_a_breaker(stage: Stage, language: str, closed: str) -> None:
    soup = stage.client("VIEWER", language).soup(PAGE)
    assert soup.find(attrs={"data-state": "closed"}).get_text(strip=True) == closed


def test_page_lists_the_providers_of_each_route_in_order(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (Route("deepseek", "deepseek-flash"), Route("local", "local-extractive-v1"))
    monkeypatch.setitem(stage.services.catalogue.routes, "default", steps)  # type: ignore[arg-type]
    routes = stage.client("VIEWER").soup(PAGE).find(id="routes").find_parent("section")
    listed = {name.get_text(): name.find_next_sibling("dd").get_text() for name in routes.find_all("dt")}
    assert listed["default"] == "deepseek/deepseek-flash, then local/local-extractive-v1"
    assert listed["user_deepseek_key"].startswith("deepseek/")


def test_breaker_is_closed_after_a_confirmation_and_audited(stage: Stage) -> None:
    stage.services.breaker.failed(SCOPE, exhausted=True)
    console = stage.client()
    link = console.soup(PAGE).find(id="close-deepseek")
    assert link["href"] == CLOSE
    assert _word(stage) == "open"
    answer = console.post(CLOSE, {**console.fields(CLOSE, CLOSE), "reason": "topped up"})
    assert (answer.status_code, answer.headers["Location"]) == (303, PAGE)
    assert _word(stage) == "closed"
    assert not console.soup(PAGE).find(id="close-deepseek")
    (row,) = _audit(stage)
    assert (row.actor, row.target_type, row.target_id, row.reason) == (
        "operator:operator",
        "provider",
        "deepseek",
        "topped up",
    )
    assert (row.before, row.after) == (
        {"state": "open", "why": "PROVIDER_ACCOUNT_EXHAUSTED"},
        {"state": "closed"},
    )


@pytest.mark.parametrize("spoiled", ["confirmation", "csrf_token"])
def test_breaker_stays_open_without_its_confirmation_or_csrf_token(stage: Stage, spoiled: str) -> None:
    stage.services.breaker.failed(SCOPE, exhausted=True)
    console = stage.client()
    form = console.fields(CLOSE, CLOSE)
    assert console.post(CLOSE, {**form, spoiled: "made-up"}).status_code in (400, 422)
    assert _word(stage) == "open"
    assert not _audit(stage)


def test_viewer_sees_the_breaker_without_cost_and_cannot_close_it(stage: Stage) -> None:
    job = stage.job(stage.succeeded())
    priced = {"currency": "USD", "cost_micros": 1_234_567, "prompt_tokens": 4321}
    add(
        stage.services.database,
        build_call(job, attempt_no=9, provider="deepseek", model="deepseek-flash", started_at=job.created_at, **priced),
    )
    stage.services.breaker.failed(SCOPE, exhausted=True)
    viewer = stage.client("VIEWER")
    text = viewer.soup(PAGE).find("main").get_text()
    assert "PROVIDER_ACCOUNT_EXHAUSTED" in text
    assert not {"$1.234567", "4,321"} & set(text.split("\n"))
    assert "$1.234567" in stage.client().soup(PAGE).find("main").get_text()
    assert viewer.soup(PAGE).find(id="close-deepseek") is None
    assert viewer.post(CLOSE, viewer.fields("/console/jobs", "/console/logout")).status_code == 403
    assert _word(stage) == "open"


def test_unconfigured_provider_is_not_found(stage: Stage) -> None:
    console = stage.client()
    token = console.fields("/console/jobs", "/console/logout")
    for name in ("nobody", "local", "deepseek.platform"):
        assert console.get(f"/console/providers/{name}/close").status_code == 404
        assert console.post(f"/console/providers/{name}/close", token).status_code == 404
    assert not _audit(stage)


def test_breaker_is_unknown_and_cannot_be_closed_during_a_redis_outage(stage: Stage, valkey: ValkeyServer) -> None:
    stage.services.breaker.failed(SCOPE, exhausted=True)
    console = stage.client()
    form = console.fields(CLOSE, CLOSE)
    valkey.kill()
    soup = console.soup(PAGE)
    assert soup.find(role="alert")
    assert soup.find(id="p-deepseek").find_parent("section").find(attrs={"data-state": "unknown"})
    assert console.post(CLOSE, form).headers["Location"] == PAGE
    assert "busy" in console.soup(PAGE).find("main").get_text()
    (row,) = _audit(stage)
    assert row.after == {"refused": "SERVICE_BUSY"}


def test_api_shows_the_same_breaker_and_closes_it_with_the_same_audit_row(stage: Stage) -> None:
    stage.services.breaker.failed(SCOPE, code="PROVIDER_TIMEOUT", exhausted=True)
    console = stage.client()
    token = {"X-CSRF-Token": console.fields("/console/jobs", "/console/logout")["csrf_token"]}
    (deepseek,) = _of(console.get("/admin-api/ai/providers").json, "deepseek")
    assert (deepseek["key"], deepseek["host"]) == ("yes", "api.deepseek.com")
    assert (deepseek["breaker"]["state"], deepseek["breaker"]["why"]) == ("open", "PROVIDER_TIMEOUT")
    assert 290_000 < deepseek["breaker"]["openForMs"] <= 300_000
    assert {"promptTokens", "costs", "unpricedCalls"} <= set(deepseek["models"][0])
    answer = console.post("/admin-api/ai/providers/deepseek/breaker/close", **token)
    assert (answer.status_code, answer.json["state"]) == (200, "closed")
    assert [row.after for row in _audit(stage)] == [{"state": "closed"}]
    (seen,) = _of(stage.client("VIEWER").get("/admin-api/ai/providers").json, "deepseek")
    assert not {"promptTokens", "completionTokens", "costs", "unpricedCalls"} & set(seen["models"][0])


def _of(body: Any, name: str) -> list[Any]:
    return [provider for provider in body["providers"] if provider["name"] == name]


def test_request_without_an_available_provider_gets_retry_after(stage: Stage) -> None:
    stage.services.breaker.failed(SCOPE, exhausted=True)
    notes = {
        "lang": "en",
        "source": {"id": "n1", "title": "Plants"},
        "segments": [{"sid": "s1", "text": "Photosynthesis is the process by which plants make food from light. " * 4}],
    }
    token = jwt.encode({"sub": "u1", "exp": time.time() + 600}, stage.services.settings.jwt_secret, "HS256")
    headers = {"Authorization": f"Bearer {token}"}
    answer = stage.app.test_client().post("/api/learning/flashcards", json=notes, headers=headers)
    assert (answer.status_code, answer.json["error"]["code"]) == (503, "PLATFORM_UNAVAILABLE")
    assert 300 <= int(answer.headers["Retry-After"]) <= 361
