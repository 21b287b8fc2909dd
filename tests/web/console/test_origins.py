"""The origin of a form: forms of this console are accepted, those of other sites are refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.web.console.stage import PASSWORD, Console, Stage, parse

HTTPS = "https://jobs.example.com"


class _Https(FlaskClient):
    def open(self, *args: Any, **kwargs: Any) -> Any:
        return super().open(*args, **{"base_url": HTTPS, **kwargs})


@pytest.fixture
def secure(stage: Stage) -> Console:
    """A browser that uses the console over HTTPS."""
    return Console(_Https(stage.app, stage.app.response_class))


def _sign_in(console: Console, **headers: str) -> Any:
    fields = console.fields("/console/login", "/console/login")
    return console.post("/console/login", {**fields, "username": "operator", "password": PASSWORD}, **headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": HTTPS},
        {"Origin": f"{HTTPS}:443"},
        {"Origin": HTTPS.upper()},
        {"Referer": f"{HTTPS}/console/login"},
        {"Sec-Fetch-Site": "same-origin", "Origin": HTTPS},
        # The proxy forwards neither host nor scheme, but the browser sends Sec-Fetch-Site.
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://outer.example.com"},
    ],
)
def test_https_sign_in_needs_no_referer(secure: Console, headers: dict[str, str]) -> None:
    assert _sign_in(secure, **headers).status_code == 303
    assert secure.get("/console/jobs").status_code == 200


FOREIGN = {
    "null": {"Origin": "null"},
    "another host": {"Origin": "https://evil.example"},
    "a longer name": {"Origin": "https://jobs.example.com.evil.example"},
    "a name before it": {"Origin": "https://evil.jobs.example.com"},
    "another port": {"Origin": f"{HTTPS}:8443"},
    "another scheme": {"Origin": "http://jobs.example.com"},
    "no origin at all": {"Origin": "jobs.example.com"},
    "a broken origin": {"Origin": "https://[jobs"},
    "a broken port": {"Origin": f"{HTTPS}:x"},
    "a foreign referer": {"Referer": "https://evil.example/console/login"},
    "a referer with our name in it": {"Referer": f"https://evil.example/?{HTTPS}/"},
    "an origin before a referer": {"Origin": "https://evil.example", "Referer": f"{HTTPS}/console/login"},
    "a sister host": {"Sec-Fetch-Site": "same-site", "Origin": "https://other.example.com"},
    "the browser says so": {"Sec-Fetch-Site": "cross-site"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_form_of_another_site_is_refused_with_the_reason(secure: Console, name: str) -> None:
    answer = _sign_in(secure, **FOREIGN[name])
    assert answer.status_code == 403
    page = parse(answer).main.get_text(" ", strip=True)
    assert "another site" in page
    assert "stale" not in page
    assert HTTPS in page, "the page names the address to open"
    assert secure.get("/console/jobs").status_code == 303


def test_refusal_of_a_foreign_form_escapes_its_origin(secure: Console) -> None:
    answer = _sign_in(secure, Origin='https://"><script>alert(1)</script>')
    assert answer.status_code == 403
    assert "<script>alert" not in answer.text


@pytest.mark.parametrize("htmx", [{}, {"HX-Request": "true"}])
@pytest.mark.parametrize("action", ["retry", "preferences", "logout"])
def test_forms_and_htmx_requests_of_another_site_are_refused(stage: Stage, action: str, htmx: dict[str, str]) -> None:
    job_id = stage.failed()
    console = stage.client()
    address = f"/console/jobs/{job_id}/retry" if action == "retry" else f"/console/{action}"
    fields = console.fields(f"/console/jobs/{job_id}/retry" if action == "retry" else "/console/jobs", address)
    sent = {**fields, "language": "zh"}
    assert console.post(address, sent, Origin="http://127.0.0.1:9", **htmx).status_code == 403
    assert stage.services.monitor.get_job(job_id).job.retried_as is None
    assert console.soup("/console/jobs").html["lang"] == "en"
    assert console.post(address, sent, Origin="http://localhost", **htmx).status_code == 303


def test_form_is_accepted_behind_a_proxy_that_ends_tls(stage: Stage) -> None:
    console = Console(stage.app.test_client())
    assert _sign_in(console, Origin="https://localhost").status_code == 303


def test_sign_in_without_the_cookie_says_that_cookies_are_needed(stage: Stage) -> None:
    fields = Console(stage.app.test_client()).fields("/console/login", "/console/login")
    answer = Console(stage.app.test_client(use_cookies=False)).post("/console/login", fields)
    assert answer.status_code == 400
    page = parse(answer).main.get_text(" ", strip=True)
    assert "cookie" in page
    assert "HTTPS" in page


def test_form_with_a_stale_token_says_to_reload(stage: Stage) -> None:
    console = stage.client()
    fields = console.fields("/console/jobs", "/console/logout")
    answer = console.post("/console/logout", {**fields, "csrf_token": "stale"})
    assert answer.status_code == 400
    assert "Reload" in parse(answer).main.get_text(" ", strip=True)


def test_refusal_of_a_foreign_form_is_translated(stage: Stage) -> None:
    for language, said in (("en", "another site"), ("zh", "其他网站")):
        answer = _sign_in(Console(stage.app.test_client(), language), Origin="https://evil.example")
        assert said in parse(answer).main.get_text()
