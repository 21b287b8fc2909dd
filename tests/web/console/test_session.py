"""Signing in and out, expired sessions, and the way back to the page."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import select, update

from aijobs.clock import utc_now
from aijobs.operators.models import Operator, OperatorSession
from tests.web.console.stage import Console, Stage, parse


def _expire(stage: Stage) -> None:
    with stage.services.database.transaction() as session:
        session.execute(update(OperatorSession).values(revoked_at=utc_now()))


def test_sign_in_leads_to_the_requested_page(stage: Stage) -> None:
    job_id = stage.queued()
    console = stage.client(None)
    refused = console.get(f"/console/jobs/{job_id}?x=1")
    assert refused.status_code == 303
    login = urlsplit(refused.headers["Location"])
    assert login.path == "/console/login"
    back = parse_qs(login.query)["next"][0]
    fields = console.fields(refused.headers["Location"], "/console/login")
    answer = console.post("/console/login", {**fields, "username": "viewer", "password": "correct horse battery"})
    assert answer.status_code == 303
    assert answer.headers["Location"] == back == f"/console/jobs/{job_id}?x=1"


@pytest.mark.parametrize(
    "address",
    [
        "//evil.example",
        "/\\evil.example",
        "/%09/evil.example",
        "/\t/evil.example",
        "https:evil.example",
        "https://evil.example/console/jobs",
        "////evil.example",
        "/console/jobs%0d%0aSet-Cookie:x=1",
        "/console/jobs\r\nSet-Cookie: x=1",
        "data:text/html,x",
        "javascript:alert(1)",
        "/console/jobs?" + "a" * 5000,
        "/console／jobs",
        "//console/jobs",
        "/console/../../evil",
        "/console/logout",
        "/console/login",
        "/console/jobs/changes",
        "/static/app.js",
        "/api/ai/jobs",
        "/nowhere",
        "console/jobs",
        " /console/jobs",
    ],
)
def test_sign_in_never_leads_to_a_foreign_or_unknown_address(stage: Stage, address: str) -> None:
    console = stage.client(None)
    fields = console.fields("/console/login", "/console/login")
    answer = console.post(
        "/console/login",
        {**fields, "next": address, "username": "viewer", "password": "correct horse battery"},
    )
    assert answer.status_code == 303
    assert answer.headers["Location"] == "/console/jobs"
    assert "Set-Cookie: x" not in str(answer.headers)


@pytest.mark.parametrize("address", ["//evil.example", "/\\evil.example", "https://evil.example/"])
def test_language_change_never_leads_to_a_foreign_address(stage: Stage, address: str) -> None:
    console = stage.client()
    fields = console.fields("/console/jobs", "/console/preferences")
    answer = console.post("/console/preferences", {**fields, "next": address, "language": "zh"})
    assert answer.headers["Location"] == "/console/jobs"


def test_wrong_name_and_wrong_password_get_the_same_message(stage: Stage) -> None:
    console = stage.client(None)
    texts = set()
    for username in ("viewer", "nobody-of-this-name"):
        answer = console.sign_in(username, "wrong")
        assert answer.status_code == 401
        texts.add(parse(answer).find(role="alert").get_text(strip=True))
        assert "wrong" not in str(parse(answer).find(id="password"))
    assert len(texts) == 1


def test_password_guessing_is_rate_limited_with_a_waiting_time(stage: Stage) -> None:
    console = stage.client(None)
    for _ in range(5):
        assert console.sign_in("viewer", "wrong").status_code == 401
    answer = console.sign_in("viewer")
    assert answer.status_code == 429
    assert int(answer.headers["Retry-After"]) > 0
    assert "wait" in parse(answer).find(role="alert").get_text()


def test_empty_sign_in_field_is_named(stage: Stage) -> None:
    console = stage.client(None)
    fields = console.fields("/console/login", "/console/login")
    answer = console.post("/console/login", fields)
    assert answer.status_code == 422
    assert parse(answer).find(id="username")["aria-invalid"] == "true"


def test_expired_session_sends_htmx_to_the_sign_in_with_the_page_as_next(stage: Stage) -> None:
    job_id = stage.running()
    console = stage.client()
    _expire(stage)
    for address in (
        "/console/jobs/changes",
        f"/console/jobs/{job_id}/changes",
        "/console/jobs",
        "/console/outbox/changes",
    ):
        answer = console.get(
            address, **{"HX-Request": "true", "HX-Current-URL": f"http://localhost/console/jobs/{job_id}"}
        )
        assert answer.status_code == 401
        login = urlsplit(answer.headers["HX-Redirect"])
        assert (login.scheme, login.netloc, login.path) == ("", "", "/console/login")
        assert parse_qs(login.query)["next"] == [f"/console/jobs/{job_id}"]
        assert "password" not in answer.text


def test_htmx_page_of_another_host_is_ignored(stage: Stage) -> None:
    console = stage.client(None)
    answer = console.get(
        "/console/jobs", **{"HX-Request": "true", "HX-Current-URL": "https://evil.example/console/jobs"}
    )
    login = answer.headers["HX-Redirect"]
    assert "evil" not in str(parse(console.get(login)))


def test_expired_session_with_a_stale_token_leads_to_the_sign_in(stage: Stage) -> None:
    failed = stage.failed()
    console = stage.client()
    form = console.fields(f"/console/jobs/{failed}/retry", f"/console/jobs/{failed}/retry")
    _expire(stage)
    for token in (form["csrf_token"], "stale", ""):
        answer = console.post(f"/console/jobs/{failed}/retry", {**form, "csrf_token": token})
        assert answer.status_code == 303, token
        assert urlsplit(answer.headers["Location"]).path == "/console/login"
        hx = console.post(
            f"/console/jobs/{failed}/retry",
            {**form, "csrf_token": token},
            **{"HX-Request": "true", "HX-Current-URL": f"http://localhost/console/jobs/{failed}"},
        )
        assert hx.status_code == 401
        assert hx.headers["HX-Redirect"].startswith("/console/login?")
    assert stage.services.monitor.get_job(failed).job.retried_as is None


def test_sign_out_needs_a_post_with_a_token(stage: Stage) -> None:
    console = stage.client()
    assert console.get("/console/logout").status_code == 405
    assert console.post("/console/logout").status_code == 400
    assert console.get("/console/jobs").status_code == 200
    fields = console.fields("/console/jobs", "/console/logout")
    assert console.post("/console/logout", fields).headers["Location"] == "/console/login"
    assert console.get("/console/jobs").status_code == 303


def test_language_is_kept_for_the_operator_and_theme_for_the_session(stage: Stage) -> None:
    console = stage.client("OPERATOR")
    fields = console.fields("/console/queues", "/console/preferences")
    assert fields["next"] == "/console/queues"
    answer = console.post("/console/preferences", {**fields, "language": "zh", "theme": "dark"})
    assert answer.headers["Location"] == "/console/queues"
    soup = console.soup("/console/queues")
    assert (soup.html["lang"], soup.html["data-theme"]) == ("zh-CN", "dark")
    with stage.services.database.read() as session:
        spoken = session.execute(select(Operator.language).where(Operator.username == "operator")).scalar_one()
    assert spoken == "zh"
    assert stage.client("OPERATOR", "en").soup("/console/queues").html["lang"] == "zh-CN"


def test_language_chosen_before_signing_in_is_kept(stage: Stage) -> None:
    console = Console(stage.app.test_client(), "en")
    fields = console.fields("/console/login", "/console/preferences")
    console.post("/console/preferences", {**fields, "language": "zh"})
    assert console.soup("/console/login").html["lang"] == "zh-CN"
    assert console.sign_in("viewer").status_code == 303
    assert console.soup("/console/jobs").html["lang"] == "zh-CN"


def test_invalid_language_or_theme_changes_nothing(stage: Stage) -> None:
    console = stage.client()
    fields = console.fields("/console/jobs", "/console/preferences")
    console.post("/console/preferences", {**fields, "language": "../../etc", "theme": '"><script>'})
    soup = console.soup("/console/jobs")
    assert (soup.html["lang"], soup.html["data-theme"]) == ("en", "auto")


def test_copied_cookie_is_invalid_after_sign_out(stage: Stage) -> None:
    console = stage.client()
    thief = stage.copy_of(console)
    assert thief.get("/console/jobs").status_code == 200
    fields = console.fields("/console/jobs", "/console/logout")
    console.post("/console/logout", fields)
    assert thief.get("/console/jobs").status_code == 303
    assert thief.get("/admin-api/ai/jobs").status_code == 401
