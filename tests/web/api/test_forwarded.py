"""Forwarded headers of proxies, and redirects, which must never lead to another host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flask import Flask, Response, jsonify, request
from flask.testing import FlaskClient

from aijobs.settings import Settings
from aijobs.web.factory import create_app
from aijobs.web.forwarded import clean_address
from aijobs.wiring.services import Services
from tests.web.api.conftest import as_user

ADDRESSES = {
    "198.51.100.9": "198.51.100.9",
    "198.51.100.9:50001": "198.51.100.9",
    "[2001:db8::1]:443": "2001:db8::1",
    "[2001:db8::1]": "2001:db8::1",
    "2001:DB8:0::1": "2001:db8::1",
    "fe80::1%eth0": "fe80::1",
    "[fe80::1%25eth0]:443": "fe80::1",
    "::ffff:198.51.100.9": "198.51.100.9",
    " 198.51.100.9 ": "198.51.100.9",
}
NO_ADDRESSES = ["", "unknown", "_hidden", "198.51.100.9:port", "198.51.100.9:50001:1", "[::1", "a.example", "1.2.3.4/8"]


@pytest.mark.parametrize(("text", "address"), ADDRESSES.items())
def test_address_is_kept_without_port_brackets_and_zone(text: str, address: str) -> None:
    assert clean_address(text) == address


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_clean_address_of_invalid_text_is_none(text: str) -> None:
    assert clean_address(text) is None


def behind(services: Services, proxies: int) -> FlaskClient:
    """Return a client of an application that trusts `proxies` proxies and shows how it sees a request."""
    settings: Settings = replace(services.settings, trusted_proxies=proxies)
    app = create_app(services=replace(services, settings=settings))

    @app.get("/api/test-seen")
    def seen() -> Response:
        return jsonify([request.remote_addr, request.scheme, request.host, request.root_path])

    return app.test_client()


EVERY_HEADER = {
    "X-Forwarded-For": "198.51.100.9:50001",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "aijobs.example",
    "X-Forwarded-Prefix": "/aijobs/",
}


def test_forwarded_headers_are_ignored_without_trusted_proxies(services: Services) -> None:
    answer = behind(services, 0).get("/api/test-seen", headers=EVERY_HEADER)
    assert answer.json == ["127.0.0.1", "http", "localhost", ""]


def test_forwarded_headers_of_a_trusted_proxy_are_used(services: Services) -> None:
    answer = behind(services, 1).get("/api/test-seen", headers=EVERY_HEADER)
    assert answer.json == ["198.51.100.9", "https", "aijobs.example", "/aijobs"]


@pytest.mark.parametrize("address", NO_ADDRESSES[1:])
def test_invalid_forwarded_address_leaves_the_peer_address(services: Services, address: str) -> None:
    answer = behind(services, 1).get("/api/test-seen", headers={"X-Forwarded-For": address})
    assert answer.json[0] == "127.0.0.1"


@pytest.mark.parametrize("prefix", ["//evil.example", "/..", "/a/../b", "evil.example", "/a b", "/%2f", "/a//b", "/é"])
def test_invalid_forwarded_prefix_is_ignored(services: Services, prefix: str) -> None:
    client = behind(services, 1)
    environ = {"HTTP_X_FORWARDED_PREFIX": prefix}
    assert client.get("/api/test-seen", environ_overrides=environ).json[3] == ""
    assert client.get("/console/jobs", environ_overrides=environ).headers["Location"].startswith("/console/login")


@pytest.mark.parametrize("scheme", ["javascript", "", "ftp"])
def test_forwarded_scheme_other_than_http_is_ignored(services: Services, scheme: str) -> None:
    answer = behind(services, 1).get("/api/test-seen", headers={"X-Forwarded-Proto": scheme})
    assert answer.json[1] == "http"


def test_sign_ins_from_one_address_through_many_ports_share_a_rate_limit(services: Services) -> None:
    client = behind(services, 1)
    found = client.get("/console/login").text.partition('name="csrf_token" type="hidden" value="')[2].partition('"')[0]
    statuses = []
    for port in range(50001, 50008):
        form = {"csrf_token": found, "username": "ann", "password": "wrong"}
        address = {"X-Forwarded-For": f"198.51.100.9:{port}"}
        statuses.append(client.post("/console/login", data=form, headers=address).status_code)
    assert statuses == [401] * 5 + [429] * 2


# --- redirects and doubled slashes -----------------------------------------------------------------------------


@pytest.mark.parametrize("doubled", ["", "/", "//evil.example/", "/\\evil.example/"])
def test_no_redirect_names_a_host(app: Flask, doubled: str) -> None:
    client = app.test_client()
    rules = [rule for rule in app.url_map.iter_rules() if not rule.arguments and "GET" in (rule.methods or ())]
    for path in {path for rule in rules for path in (rule.rule, rule.rule.rstrip("/"), f"{rule.rule}/")}:
        address = f"{doubled}{path}"
        answer = client.get("/", environ_overrides={"PATH_INFO": address}, headers={"Host": "evil.example"})
        location = answer.headers.get("Location", "/")
        assert answer.status_code in (200, 303, 302, 401, 404, 503), (address, answer.status_code)
        assert location.startswith("/"), (address, location)
        assert not location.startswith(("//", "/\\")), (address, location)


def test_console_without_trailing_slash_redirects_to_the_jobs(client: FlaskClient) -> None:
    answer = client.get("/console", headers={"Host": "evil.example"})
    assert (answer.status_code, answer.headers["Location"][:14]) == (302, "/console/jobs")


def test_router_never_redirects(app: Flask) -> None:
    assert app.url_map.merge_slashes is False
    strict = [rule.rule for rule in app.url_map.iter_rules() if rule.rule.endswith("/") and rule.strict_slashes]
    assert strict in ([], ["/"])


@pytest.mark.parametrize("path", ["//api/ai/jobs", "///api/ai/jobs", "/api//ai/jobs", "/./api/ai/jobs"])
def test_ambiguous_path_is_not_found(client: FlaskClient, path: str) -> None:
    answer = client.get("/", environ_overrides={"PATH_INFO": path}, headers=as_user())
    assert answer.status_code == 404
