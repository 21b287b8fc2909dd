"""Below a prefix set by the server or a proxy, every link, form, redirect and answer stays below it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from bs4 import BeautifulSoup
from werkzeug.test import Client

from aijobs.cli.tokens import issue_user_token
from aijobs.settings import resource
from aijobs.web.console.pages import PAGES
from aijobs.web.factory import create_app
from tests.web.console.stage import PASSWORD, Stage, parse

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

PREFIX = "/aijobs"
ADDRESSES = ("href", "src", "action", "hx-get", "hx-post", "data-address")
NOTES = {
    "lang": "en",
    "source": {"id": "n1", "title": "Plants"},
    "segments": [{"sid": "s1", "text": "Photosynthesis is the process by which plants make food from light."}],
}


class Proxy:
    """A WSGI middleware that serves the application only below the prefix, as a server or reverse proxy does."""

    def __init__(self, app: WSGIApplication, set_prefix: Callable[[WSGIEnvironment], None]) -> None:
        self._app, self._set_prefix = app, set_prefix

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        assert path.startswith(PREFIX), path
        environ["PATH_INFO"] = path.removeprefix(PREFIX)
        self._set_prefix(environ)
        return self._app(environ, start_response)


def by_server(environ: WSGIEnvironment) -> None:
    environ["SCRIPT_NAME"] = PREFIX


def by_header(environ: WSGIEnvironment) -> None:
    environ["HTTP_X_FORWARDED_PREFIX"] = PREFIX


@pytest.fixture(params=[by_server, by_header])
def browser(stage: Stage, request: pytest.FixtureRequest) -> Client:
    services, proxies = stage.services, int(request.param is by_header)
    app = create_app(services=replace(services, settings=replace(services.settings, trusted_proxies=proxies)))
    app.jinja_env.bytecode_cache = stage.app.jinja_env.bytecode_cache
    return Client(Proxy(app, request.param), app.response_class)


def fields(soup: Any, action: str) -> dict[str, str]:
    """Return the fields of the form that leads to `action`, with their values."""
    form = next(form for form in soup.find_all("form") if form["action"] == action)
    inputs = form.find_all(["input", "textarea"])
    return {field["name"]: field.get("value", "") for field in inputs if field.get("name")}


def sign_in(browser: Client, back: str) -> str:
    """Open a page, follow to the sign-in, sign in; return the address of the redirect."""
    login = browser.get(back).headers["Location"]
    assert login.startswith(f"{PREFIX}/console/login?next=")
    form = fields(parse(browser.get(login)), f"{PREFIX}/console/login")
    answer = browser.post(login, data={**form, "username": "super_admin", "password": PASSWORD})
    assert answer.status_code == 303
    return str(answer.headers["Location"])


def addresses(soup: BeautifulSoup) -> set[str]:
    """Return all addresses of a page that lead to this host."""
    found = {tag[name] for name in ADDRESSES for tag in soup.find_all(attrs={name: True})}
    return {str(address) for address in found if address and not str(address).startswith(("#", "https://", "data:"))}


def test_every_address_of_every_page_is_below_the_prefix(stage: Stage, browser: Client) -> None:
    stage.each_phase()
    start = f"{PREFIX}/console/jobs?lifecycleStatus=failed"
    assert sign_in(browser, start) == start
    waiting, seen, shown = {f"{PREFIX}", f"{PREFIX}/console", start}, set[str](), set[str]()
    while waiting:
        address = waiting.pop()
        assert re.match(rf"{PREFIX}(/|\Z)", address), address
        # One page of each kind is enough, because parameters don't change its links.
        kind = re.sub(r"[0-9a-f-]{36}", "ID", urlsplit(address).path)
        if kind in seen or kind.endswith("/logout"):
            continue
        seen.add(kind)
        answer = browser.get(address, buffered=True)
        assert answer.status_code in (200, 302, 303, 405), (address, answer.status_code)
        if "Location" in answer.headers:
            waiting.add(answer.headers["Location"])
        elif answer.mimetype == "text/html" and answer.status_code == 200:
            shown.add(kind)
            waiting |= addresses(parse(answer))
    assert {f"{PREFIX}/console/{page}" for page in ("jobs", "queues", "workers", "usage", "audit", "jobs/ID")} <= shown
    assert f"{PREFIX}/static/app.js" in seen
    assert len(shown) >= len(PAGES) - 3


def test_language_form_and_current_page_work_below_the_prefix(browser: Client) -> None:
    queues = f"{PREFIX}/console/queues"
    sign_in(browser, queues)
    soup = parse(browser.get(queues))
    assert [link["href"] for link in soup.find_all("a", attrs={"aria-current": "page"})] == [queues]
    action = f"{PREFIX}/console/preferences"
    answer = browser.post(action, data={**fields(soup, action), "language": "zh"})
    assert answer.headers["Location"] == queues


def test_next_of_another_prefix_leads_to_the_start_page(browser: Client) -> None:
    for back in ("/console/queues", "/other/console/queues", f"{PREFIX}x/console/queues", f"/{PREFIX}/console/queues"):
        login = f"{PREFIX}/console/login?next={back}"
        assert fields(parse(browser.get(login)), f"{PREFIX}/console/login")["next"] == f"{PREFIX}/console/jobs"


def test_expired_session_of_a_fragment_leads_to_the_sign_in_below_the_prefix(browser: Client) -> None:
    headers = {"HX-Request": "true", "HX-Current-URL": f"http://localhost{PREFIX}/console/queues"}
    answer = browser.get(f"{PREFIX}/console/jobs/changes", headers=headers)
    assert (answer.status_code, answer.headers["HX-Redirect"]) == (
        401,
        f"{PREFIX}/console/login?next={PREFIX}/console/queues",
    )


def test_retry_by_form_leads_to_the_child_below_the_prefix(stage: Stage, browser: Client) -> None:
    page = f"{PREFIX}/console/jobs/{stage.failed()}"
    sign_in(browser, page)
    answer = browser.post(f"{page}/retry", data=fields(parse(browser.get(f"{page}/retry")), f"{page}/retry"))
    assert answer.status_code == 303
    assert browser.get(answer.headers["Location"]).status_code == 200


def test_api_answers_with_addresses_below_the_prefix(stage: Stage, browser: Client) -> None:
    user = {"Authorization": f"Bearer {issue_user_token(stage.services.settings, 'u1', 1)}"}
    made = browser.post(f"{PREFIX}/api/learning/flashcards", json=NOTES, headers=user)
    assert made.status_code == 202
    assert made.headers["Location"] == f"{PREFIX}/api/ai/jobs/{made.get_json()['jobId']}"
    assert browser.get(made.headers["Location"], headers=user).status_code == 200
    for document in ("api", "admin-api"):
        assert browser.get(f"{PREFIX}/{document}/openapi.json").get_json()["servers"] == [{"url": PREFIX}]


@pytest.mark.parametrize("folder", ["templates", "static"])
def test_templates_and_scripts_contain_no_fixed_address(folder: str) -> None:
    built = re.compile(r"""["'`(=]/(?:console|api|admin-api|internal|static)\b|(?:href|src|action|hx-\w+)=["']?/""")
    found = [
        f"{path.name}:{number}"
        for path in resource(folder).rglob("*.*")
        if path.suffix in (".html", ".js", ".css") and "vendor" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if built.search(line)
    ]
    assert not found
