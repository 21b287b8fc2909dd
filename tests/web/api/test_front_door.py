"""Rules for every answer: headers, health, and errors without secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from gunicorn.http.errors import InvalidChunkSize, NoMoreData
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError

from aijobs import logs
from aijobs.db.clock import DatabaseClock
from aijobs.db.database import Database
from aijobs.errors import ApiError
from aijobs.job_types.flashcard_generation import SAMPLE_INPUT
from aijobs.jobs.errors import JobGone, JobLockConflict
from aijobs.jobs.models import PASSES
from aijobs.settings import Settings
from aijobs.upkeep.pass_log import PassLog
from aijobs.web.factory import create_app
from aijobs.wiring.services import Services, build_services
from tests.support.lines import captured_lines
from tests.support.rows import prepare_database
from tests.web.api.conftest import as_user


def test_liveness_does_not_depend_on_the_database(client: FlaskClient, database: Database) -> None:
    assert client.get("/readyz").json == {
        "status": "ready",
        "database": "ok",
        "schema": "ok",
        "broker": "ok",
        "passes": "overdue",
    }
    with database.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    wrong = client.get("/readyz")
    assert (wrong.status_code, wrong.json["schema"]) == (503, "wrong")
    path = Path(str(database.engine.url.database))
    database.dispose()
    path.write_bytes(b"this is no database" * 100)
    away = client.get("/readyz")
    assert (away.status_code, away.json["database"]) == (503, "away")
    assert client.get("/healthz").json == {"status": "ok"}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Collect log lines of level ERROR."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure("ERROR", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def full_client(settings: Settings, create_sqlite_database: Callable[..., str]) -> Iterator[FlaskClient]:
    """A client of an application whose database can't grow, as on a full disk."""
    url = create_sqlite_database(prepare_database)
    services = build_services(replace(settings, database_url=url))
    # SQLite never lowers the limit below the present size.
    event.listen(services.database.engine, "connect", lambda found, _: found.execute("PRAGMA max_page_count=1"))
    yield create_app(services=services).test_client()
    services.database.dispose()
    services.broker.client.close()


def test_process_is_not_ready_and_logs_the_cause_if_the_disk_is_full(
    full_client: FlaskClient, log: io.StringIO
) -> None:
    client = full_client
    answers = [client.post("/api/learning/flashcards", json=SAMPLE_INPUT, headers=as_user()) for _ in range(20)]
    refused = [answer for answer in answers if answer.status_code != 202]
    assert {(answer.status_code, answer.json["error"]["code"]) for answer in refused} == {(503, "SERVICE_BUSY")}
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert {(line["event"], line["error"], line["cause"]) for line in lines} == {
        ("web.busy", "OperationalError", "disk_full")
    }
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json["status"], ready.json["database"]) == (503, "not_ready", "disk_full")


def test_readiness_reports_the_worst_pass_but_does_not_fail_for_it(client: FlaskClient, database: Database) -> None:
    log = PassLog(database, DatabaseClock())
    for name in PASSES:
        log.run(name, 60, lambda: 0)
    assert client.get("/readyz").json["passes"] == "on_time"
    with pytest.raises(TypeError):
        log.run("reaper", 60, lambda: int([]))  # type: ignore[call-overload]
    failing = client.get("/readyz")
    assert (failing.status_code, failing.json["passes"]) == (200, "failing")


@pytest.mark.parametrize("path", ["/healthz", "/api/ai/jobs", "/api/nothing", "/console/login", "/nowhere"])
def test_every_answer_has_security_headers(client: FlaskClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"


def test_session_cookie_is_secure_in_production(services: Services, settings: Settings) -> None:
    app = create_app(services=replace(services, settings=replace(settings, env="production")))
    assert app.config["SESSION_COOKIE_SECURE"] is True
    assert app.config["SESSION_COOKIE_HTTPONLY"] is True
    assert app.config["SESSION_COOKIE_SAMESITE"] == "Lax"


@pytest.mark.parametrize(("proxies", "seen"), [(0, "127.0.0.1"), (1, "10.0.0.9")])
def test_forwarded_address_is_used_only_if_a_proxy_is_configured(
    services: Services, settings: Settings, proxies: int, seen: str
) -> None:
    app = create_app(services=replace(services, settings=replace(settings, trusted_proxies=proxies)))

    @app.get("/api/test-address")
    def address() -> str:
        from flask import request

        return str(request.remote_addr)

    answer = app.test_client().get("/api/test-address", headers={"X-Forwarded-For": "1.2.3.4, 10.0.0.9"})
    assert answer.text == seen


class Refusal(Exception):
    """An error whose text must not appear in answers or logs."""


ERRORS: dict[str, tuple[Exception, int, str]] = {
    "any": (Refusal("CANARY"), 500, "INTERNAL_ERROR"),
    "database": (OperationalError("SELECT CANARY", {"x": "CANARY"}, Exception("CANARY")), 503, "SERVICE_BUSY"),
    "recursion": (RecursionError("CANARY"), 500, "INTERNAL_ERROR"),
    "unicode": ("x".encode("utf-16"), 500, "INTERNAL_ERROR"),  # type: ignore[dict-item]
    "gone": (JobGone("CANARY", "CANARY"), 404, "JOB_NOT_FOUND"),
    "conflict": (JobLockConflict("CANARY", "CANARY"), 503, "SERVICE_BUSY"),
    "api": (ApiError("QUOTA_EXCEEDED"), 429, "QUOTA_EXCEEDED"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_text_of_an_exception_is_neither_answered_nor_logged(
    app: Flask, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    error, status, code = ERRORS[name]

    @app.get("/api/test-error")
    def fail() -> Any:
        if isinstance(error, Exception):
            raise error
        return error.decode("ascii")  # type: ignore[unreachable]

    with caplog.at_level(logging.DEBUG):
        answer = app.test_client().get("/api/test-error")
    assert (answer.status_code, answer.json["error"]["code"]) == (status, code)
    assert set(answer.json["error"]) == {"code", "message"}
    printed = capsys.readouterr()
    everything = answer.text + str(answer.headers) + caplog.text + printed.out + printed.err
    assert "CANARY" not in everything
    if status == 503:
        assert int(answer.headers["Retry-After"]) >= 1
    if status >= 500:
        assert answer.headers["X-Request-ID"]
    page = app.test_client().get("/nowhere/at/all")
    assert page.status_code == 404
    assert page.content_type.startswith("text/html")


@pytest.mark.parametrize(("error", "event"), [(Refusal("CANARY"), "web.failed"), (ERRORS["database"][0], "web.busy")])
def test_log_line_of_a_server_error_names_the_frames_where_it_happened(
    app: Flask, error: Exception, event: str
) -> None:
    @app.get("/api/test-error")
    def fail() -> Any:
        raise error

    with captured_lines() as lines:
        app.test_client().get("/api/test-error")
    (line,) = [line for line in lines() if line["event"] == event]
    assert line["where"][-1].endswith(" fail")
    assert __file__ in line["where"][-1]
    assert line["at"].endswith("Z")
    assert (line["level"], line["route"]) == ("error", "/api/test-error")


def test_valid_request_id_is_returned(client: FlaskClient) -> None:
    kept = client.get("/api/nothing", headers={"X-Request-ID": "abc-1"})
    assert kept.headers["X-Request-ID"] == "abc-1"
    for odd in ("a b", "x" * 65, "<script>"):
        assert "X-Request-ID" not in client.get("/api/nothing", headers={"X-Request-ID": odd}).headers


@pytest.mark.parametrize("path", ["/api/nothing", "/admin-api/nothing", "/internal/nothing", "/api/"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
def test_unknown_api_path_is_not_found_in_json(client: FlaskClient, method: str, path: str) -> None:
    answer = client.open(path, method=method)
    assert answer.status_code == 404
    assert answer.json == {"error": {"code": "NOT_FOUND", "message": "There is nothing here."}}


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "POST"])
def test_unsupported_method_is_refused_in_json(client: FlaskClient, method: str) -> None:
    answer = client.open("/api/ai/jobs/x", method=method, headers=as_user())
    assert answer.status_code == 405
    assert answer.json["error"]["code"] == "METHOD_NOT_ALLOWED"
    overridden = client.post("/api/ai/jobs/x", headers={**as_user(), "X-HTTP-Method-Override": "GET"})
    assert overridden.status_code == 405


@pytest.mark.parametrize("header", ["", "zh;q=0", "*", "zz-ZZ", "en" * 5000, ";;;,,q=", "\x80\xff"])
def test_any_accept_language_header_is_answered(client: FlaskClient, header: str) -> None:
    answer = client.get("/api/nothing", environ_overrides={"HTTP_ACCEPT_LANGUAGE": header})
    assert answer.status_code == 404
    assert answer.headers["Content-Language"] == "en"


class BrokenReader:
    """A `wsgi.input` that can't read the body."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self, size: int = -1) -> bytes:
        raise self._error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BlockingIOError("CANARY"), "body_incomplete"),
        (TimeoutError("CANARY"), "body_incomplete"),
        (ConnectionResetError("CANARY"), "body_incomplete"),
        (NoMoreData(b"CANARY"), "body_incomplete"),
        (InvalidChunkSize(b"CANARY"), "body_malformed"),
        (ValueError("CANARY"), "body_malformed"),
        (Refusal("CANARY"), "body_malformed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_exception_of_the_servers_body_reader_is_a_bad_request(
    client: FlaskClient, error: Exception, reason: str
) -> None:
    broken = {"wsgi.input": BrokenReader(error), "CONTENT_LENGTH": "9"}
    with captured_lines() as lines:
        answer = client.post(
            "/api/learning/flashcards",
            headers=as_user(),
            content_type="application/json",
            environ_overrides=broken,
        )
        form = "application/x-www-form-urlencoded"
        signing_in = client.post("/console/login", content_type=form, environ_overrides=broken)
    assert (answer.status_code, answer.json["error"]["details"]) == (400, {"reason": reason})
    assert signing_in.status_code == 400
    assert not [line for line in lines() if line["level"] == "error"]
