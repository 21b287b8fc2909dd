"""Two installations on one host and different ports: a browser sends the same cookies to both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from http.cookiejar import CookieJar
from pathlib import Path
from threading import Thread
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import pytest
from werkzeug.serving import make_server

from aijobs.web.factory import create_app
from aijobs.wiring.services import Services, build_services
from tests.web.console.stage import PASSWORD, Stage, build_settings, prepare


@contextmanager
def _served(services: Services) -> Iterator[str]:
    """Serve the console of an installation on its own port."""
    server = make_server("127.0.0.1", 0, create_app(services=services), threaded=True)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def addresses(create_sqlite_database: Callable[..., str], redis_url: str, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two installations, each with its own keys and database."""
    with ExitStack() as stack:
        found = []
        for name in ("first", "second"):
            settings = build_settings(create_sqlite_database(prepare), redis_url, tmp_path / name)
            services = build_services(settings)
            stack.callback(services.database.dispose)
            stack.callback(services.broker.client.close)
            found.append(stack.enter_context(_served(services)))
        yield found[0], found[1]


def _open(browser: OpenerDirector, address: str, form: dict[str, str] | None = None) -> tuple[str, str]:
    """Return the browser's final address and the page there."""
    data = urlencode(form).encode() if form is not None else None
    with closing(browser.open(address, data, timeout=30)) as answer:
        return answer.geturl(), answer.read().decode()


def _sign_in(browser: OpenerDirector, address: str) -> None:
    _, page = _open(browser, f"{address}/console/login")
    token = re.search(r'name="csrf_token"[^>]*value="([^"]+)"', page)
    assert token is not None
    form = {"csrf_token": token[1], "username": "operator", "password": PASSWORD}
    where, _ = _open(browser, f"{address}/console/login", form)
    assert where == f"{address}/console/jobs"


def test_sign_in_keeps_the_session_of_another_installation_on_the_same_host(addresses: tuple[str, str]) -> None:
    jar = CookieJar()
    browser = build_opener(HTTPCookieProcessor(jar))
    for address in addresses:
        _sign_in(browser, address)
    for address in addresses:
        assert _open(browser, f"{address}/console/queues")[0] == f"{address}/console/queues"
    assert len({cookie.name for cookie in jar}) == 2


def test_web_processes_of_one_installation_use_the_same_cookie_name(
    sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    settings = build_settings(sqlite_url, redis_url, tmp_path)
    names = set()
    for changed in (settings, replace(settings, port=9, instance_path=tmp_path / "elsewhere")):
        services = build_services(changed)
        names.add(create_app(services=services).config["SESSION_COOKIE_NAME"])
        services.database.dispose()
        services.broker.client.close()
    assert len(names) == 1
    assert settings.secret_key not in names.pop()


@pytest.mark.parametrize(
    ("env", "base", "begins", "path"),
    [
        ("production", "https://jobs.example.com", "__Host-aijobs_session_", "/"),
        ("production", "https://example.com/jobs", "aijobs_session_", "/jobs"),
        ("development", "http://localhost", "aijobs_session_", "/"),
        ("development", "http://localhost/jobs", "aijobs_session_", "/jobs"),
    ],
)
def test_cookie_is_bound_to_its_host_in_production_and_to_its_path_below_the_prefix(
    stage: Stage, env: str, base: str, begins: str, path: str
) -> None:
    app = create_app(services=replace(stage.services, settings=replace(stage.services.settings, env=env)))
    client = app.test_client()
    (header,) = client.get("/console/login", base_url=base).headers.getlist("Set-Cookie")
    name, _, rest = header.partition("=")
    attributes = set(rest.split("; ")[1:])
    assert name.startswith(begins)
    assert attributes == {"HttpOnly", "SameSite=Lax", f"Path={path}"} | ({"Secure"} if env == "production" else set())
    document = client.get("/admin-api/openapi.json", base_url=base).json
    assert document["components"]["securitySchemes"]["session"]["name"] == name
