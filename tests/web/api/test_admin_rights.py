"""Permissions in the admin API: each request checks them against the database."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import func, select, update

from aijobs.clock import utc_now
from aijobs.db.database import Database
from aijobs.errors import ApiError
from aijobs.ids import new_id
from aijobs.operators.models import AuditLog, Operator, OperatorSession, OperatorToken
from aijobs.operators.throttle import PER_ADDRESS, LoginAttempts
from aijobs.web.api import admin, user
from aijobs.web.auth import sign_in
from aijobs.wiring.services import Services
from tests.support.rows import BEGIN, add, build_event, build_job, ended
from tests.web.api.conftest import PASSWORD, Person, as_user

MakeOperator = Callable[[str], Person]

JSON: dict[str, Any] = {"json": {"reason": "a test"}}

ROUTES = {
    "list": ("GET", "/admin-api/ai/jobs", {}, "view"),
    "detail": ("GET", "/admin-api/ai/jobs/{job}", {}, "view"),
    "queues": ("GET", "/admin-api/ai/jobs/queues/status", {}, "view"),
    "outbox": ("GET", "/admin-api/ai/jobs/outbox/status", {}, "view"),
    "workers": ("GET", "/admin-api/ai/workers", {}, "view"),
    "providers": ("GET", "/admin-api/ai/providers", {}, "view"),
    "close_breaker": ("POST", "/admin-api/ai/providers/{provider}/breaker/close", JSON, "provider_fix"),
    "usage": ("GET", "/admin-api/ai/usage", {}, "view_usage"),
    "retry": ("POST", "/admin-api/ai/jobs/{job}/retry", {}, "retry"),
    "cancel": ("POST", "/admin-api/ai/jobs/{job}/cancel", JSON, "cancel"),
    "requeue": ("POST", "/admin-api/ai/outbox/{event}/requeue", JSON, "outbox_fix"),
    "reveal": ("POST", "/admin-api/ai/jobs/{job}/reveal", JSON, "reveal"),
}
ALLOWED = {
    "VIEWER": {"view"},
    "OPERATOR": {"view", "view_usage", "retry", "cancel", "outbox_fix", "provider_fix"},
    "SUPER_ADMIN": {"view", "view_usage", "retry", "cancel", "outbox_fix", "provider_fix", "reveal"},
}


@pytest.fixture
def places(database: Database) -> dict[str, str]:
    """Add a failed job with a snapshot to copy, and a dead end event."""
    from tests.support.rows import build_snapshot

    job = build_job(**ended("failed"))
    event = build_event(job, event_type="ai.job.failed", status="dead", published_at=None)
    add(database, job, event, build_snapshot(job, {"calls": [{}]}))
    return {"job": job.id, "event": event.id, "provider": "deepseek"}


def test_table_covers_every_route() -> None:
    assert {(m, p.replace("{job}", "{jobId}").replace("{event}", "{eventId}")) for m, p, _, _ in ROUTES.values()} == {
        (operation.method, operation.path) for operation in admin.OPERATIONS
    }


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("who", ["anonymous", "user", "nonsense", *ALLOWED])
def test_each_route_requires_its_permission(
    client: FlaskClient, operator: MakeOperator, places: dict[str, str], route: str, who: str
) -> None:
    method, path, options, right = ROUTES[route]
    headers = {
        "anonymous": {},
        "user": as_user(),
        "nonsense": {"Authorization": "Bearer ajo_nonsense"},
    }.get(who)
    if headers is None:
        headers = operator(who).headers
    answer = client.open(path.format(**places), method=method, headers=headers, **options)
    if who in ("anonymous", "nonsense"):
        assert (answer.status_code, answer.json["error"]["code"]) == (401, "UNAUTHORIZED")
    elif who == "user" or right not in ALLOWED[who]:
        assert (answer.status_code, answer.json["error"]["code"]) == (403, "FORBIDDEN")
    else:
        assert answer.status_code in (200, 201), answer.json
    assert answer.content_type == "application/json"


@pytest.mark.parametrize("who", ["VIEWER", "OPERATOR", "SUPER_ADMIN"])
def test_internal_message_is_shown_to_super_admins_only(
    client: FlaskClient, database: Database, operator: MakeOperator, who: str
) -> None:
    job = build_job(**ended("failed", internal_error_message='File "engine.py", line 7, in run'))
    add(database, job)
    body = client.get(f"/admin-api/ai/jobs/{job.id}", headers=operator(who).headers).json
    assert body.get("internalErrorMessage") == (job.internal_error_message if who == "SUPER_ADMIN" else None)
    assert ("internalErrorMessage" in body) == (who == "SUPER_ADMIN")


CHANGES = {
    "role": (Operator, {"role": "VIEWER"}, 403),
    "account": (Operator, {"active": False}, 401),
    "unknown role": (Operator, {"role": "GOD"}, 403),
    "revoked": (OperatorToken, {"revoked_at": BEGIN}, 401),
    "expired": (OperatorToken, {"expires_at": BEGIN}, 401),
}


@pytest.mark.parametrize("change", CHANGES)
def test_revoked_permission_is_refused_at_the_next_request(
    client: FlaskClient, database: Database, operator: MakeOperator, change: str
) -> None:
    headers = operator("OPERATOR").headers
    assert client.get("/admin-api/ai/usage", headers=headers).status_code == 200
    table, values, status = CHANGES[change]
    with database.transaction() as session:
        session.execute(update(table).values(**values))
    assert client.get("/admin-api/ai/usage", headers=headers).status_code == status


@pytest.fixture
def signed_in(app: Flask, operator: MakeOperator) -> Callable[[str], FlaskClient]:
    """`signed_in(role)` returns a client with an operator's session."""

    def sign(role: str) -> FlaskClient:
        username = operator(role).username

        @app.post(f"/api/test-sign-in/{username}")
        def enter() -> str:
            assert sign_in(username, PASSWORD) is not None
            return "in"

        @app.get(f"/api/test-csrf/{username}")
        def csrf() -> str:
            from flask_wtf.csrf import generate_csrf

            return str(generate_csrf())

        client = app.test_client()
        assert client.post(f"/api/test-sign-in/{username}").status_code == 200
        client.csrf = client.get(f"/api/test-csrf/{username}").text  # type: ignore[attr-defined]
        return client

    return sign


def test_write_with_a_session_requires_the_csrf_header(
    signed_in: Callable[[str], FlaskClient], places: dict[str, str]
) -> None:
    client = signed_in("OPERATOR")
    token = client.csrf  # type: ignore[attr-defined]
    path = f"/admin-api/ai/jobs/{places['job']}/cancel"
    assert client.get("/admin-api/ai/jobs").status_code == 200
    for headers, data in (
        ({}, None),
        ({"X-CSRF-Token": "wrong"}, None),
        ({"X-CSRF-Token": token[:-2]}, None),
        ({}, {"csrf_token": token}),
        ({"Origin": "https://evil.example"}, None),
        ({"X-HTTP-Method-Override": "GET"}, None),
    ):
        refused = client.post(path, headers=headers, data=data)
        assert refused.status_code == 403, headers
        assert refused.json["error"] == {
            "code": "FORBIDDEN",
            "message": "You may not do this.",
            "details": {"reason": "csrf"},
        }
    assert client.post(path, headers={"X-CSRF-Token": token}).status_code == 200


def test_authorization_header_takes_precedence_over_a_session(
    signed_in: Callable[[str], FlaskClient], places: dict[str, str]
) -> None:
    client = signed_in("SUPER_ADMIN")
    for headers in ({"Authorization": "Bearer ajo_nonsense"}, {"Authorization": "Basic x"}):
        assert client.get("/admin-api/ai/jobs", headers=headers).status_code == 401


ENDS: dict[str, dict[str, Any]] = {
    "revoked": {"revoked_at": utc_now()},
    "idle": {"seen_at": utc_now() - timedelta(hours=12)},
    "expired": {"created_at": utc_now() - timedelta(days=7)},
}


@pytest.mark.parametrize("values", ENDS.values(), ids=ENDS)
def test_session_that_has_ended_is_unauthorized_in_the_api(
    signed_in: Callable[[str], FlaskClient], database: Database, places: dict[str, str], values: dict[str, Any]
) -> None:
    client = signed_in("OPERATOR")
    write = {"headers": {"X-CSRF-Token": client.csrf}}  # type: ignore[attr-defined]
    assert client.get("/admin-api/ai/jobs").status_code == 200
    with database.transaction() as session:
        session.execute(update(OperatorSession).values(**values))
    for answer in (
        client.get("/admin-api/ai/jobs"),
        client.post(f"/admin-api/ai/jobs/{places['job']}/cancel", **write),
    ):
        assert (answer.status_code, answer.json["error"]["code"]) == (401, "UNAUTHORIZED")
    assert "Location" not in answer.headers


def test_session_is_unauthorized_in_the_user_api(signed_in: Callable[[str], FlaskClient]) -> None:
    client = signed_in("SUPER_ADMIN")
    assert client.get("/api/ai/jobs").status_code == 401


def test_every_action_writes_an_audit_row_with_actor_reason_and_result(
    client: FlaskClient, database: Database, operator: MakeOperator, places: dict[str, str]
) -> None:
    person = operator("SUPER_ADMIN")
    headers = {**person.headers, "User-Agent": "curl/8"}
    job = f"/admin-api/ai/jobs/{places['job']}"
    revealed = client.post(f"{job}/reveal", headers=headers, json={"reason": "customer asks"})
    assert revealed.json == {"jobId": places["job"], "snapshot": {"calls": [{}]}}
    child = client.post(f"{job}/retry", headers=headers, json={"reason": "again"})
    assert child.status_code == 201
    assert client.post(f"/admin-api/ai/jobs/{child.json['jobId']}/retry", headers=headers).status_code == 409
    client.post(f"/admin-api/ai/jobs/{child.json['jobId']}/cancel", headers=headers)
    client.post(f"/admin-api/ai/outbox/{places['event']}/requeue", headers=headers)
    with database.read() as session:
        rows = session.execute(select(AuditLog).order_by(AuditLog.at, AuditLog.id)).scalars().all()
    assert [(row.action, row.target_id, row.reason) for row in rows] == [
        ("job.reveal", places["job"], "customer asks"),
        ("job.retry", places["job"], "again"),
        ("job.retry", child.json["jobId"], None),
        ("job.cancel", child.json["jobId"], None),
        ("outbox.requeue", places["event"], None),
    ]
    assert {(row.actor, row.remote_addr, row.user_agent) for row in rows} == {
        (f"operator:{person.username}", "127.0.0.1", "curl/8")
    }
    assert rows[0].after == {"snapshot": True, "validatedOutput": False}
    assert rows[1].before == {"lifecycleStatus": "failed", "phase": "failed", "attempt": 1}
    assert rows[1].after == {"childJobId": child.json["jobId"], "created": True}
    assert rows[2].after == {"refused": "JOB_NOT_RETRYABLE"}
    assert rows[3].before["lifecycleStatus"] == "queued"
    assert rows[3].after["lifecycleStatus"] == "cancelled"
    event = [{"status": status, "jobId": places["job"]} for status in ("dead", "pending")]
    assert [rows[4].before, rows[4].after] == event


def dump(database: Database) -> dict[str, list[Any]]:
    """Return all rows of all tables."""
    from aijobs.db.database import Base

    with database.read() as session:
        return {
            table.name: [tuple(row) for row in session.execute(select(table).order_by(*table.primary_key))]
            for table in Base.metadata.sorted_tables
        }


def test_get_changes_nothing_on_any_route(
    app: Flask, database: Database, operator: MakeOperator, places: dict[str, str]
) -> None:
    client = app.test_client()
    headers_of = [{}, as_user(), operator("SUPER_ADMIN").headers]
    for headers in headers_of:  # The first use of a token within an hour writes its time.
        client.get("/admin-api/ai/jobs", headers=headers)
    before = dump(database)
    rules = [rule for rule in app.url_map.iter_rules() if rule.endpoint != "static"]
    assert len(rules) > 15
    for rule in rules:
        names = {name: places["event"] if name == "event_id" else places["job"] for name in rule.arguments}
        path = rule.build(names, append_unknown=False)[1]  # type: ignore[index]
        for headers in headers_of:
            for method in ("GET", "HEAD", "OPTIONS"):
                answer = client.open(path, method=method, headers=headers)
                assert answer.status_code < 500, (method, path)
    assert dump(database) == before


def test_sign_in_is_rate_limited_after_five_wrong_passwords(
    app: Flask, client: FlaskClient, database: Database, operator: MakeOperator
) -> None:
    from flask import request

    @app.post("/api/test-login")
    def login() -> dict[str, bool]:
        return {"in": sign_in(request.args["u"], request.args["p"]) is not None}

    def attempt(username: str, password: str, address: str = "10.0.0.1") -> Any:
        return client.post(
            "/api/test-login",
            query_string={"u": username, "p": password},
            environ_overrides={"REMOTE_ADDR": address},
        )

    username = operator("OPERATOR").username
    for _ in range(4):
        assert attempt(username, "wrong").json == {"in": False}
    assert attempt(username, PASSWORD).json == {"in": True}  # A success resets the count.
    for _ in range(5):
        assert attempt(username, "wrong").json == {"in": False}
    for password in (PASSWORD, "wrong"):
        refused = attempt(username, password)
        assert refused.status_code == 429
        assert refused.json["error"]["code"] == "RATE_LIMITED"
        assert int(refused.headers["Retry-After"]) > 0
    # The limit is per address and operator: other addresses and other operators can sign in.
    assert attempt(username, PASSWORD, "10.0.0.2").json == {"in": True}
    assert attempt(operator("VIEWER").username, PASSWORD).json == {"in": True}
    with database.read() as session:
        counted = session.execute(select(AuditLog.action, func.count()).group_by(AuditLog.action)).all()
    assert {tuple(row) for row in counted} == {("login_failed", 9), ("login", 3)}, "one row for each attempt"


def test_address_that_tries_many_names_is_rate_limited_and_another_is_not(
    services: Services, database: Database
) -> None:
    def attempts(number: int, address: str) -> LoginAttempts:
        return LoginAttempts(database, services.clock, None, f"name-{number}", address)

    for number in range(PER_ADDRESS):
        attempts(number, "10.0.0.1").check()
        attempts(number, "10.0.0.1").record_failure()
    with pytest.raises(ApiError) as refused:
        attempts(PER_ADDRESS, "10.0.0.1").check()
    assert refused.value.code == "RATE_LIMITED"
    attempts(PER_ADDRESS, "10.0.0.2").check()


def test_unknown_username_is_never_stored(app: Flask, client: FlaskClient, database: Database) -> None:
    from flask import request

    @app.post("/api/test-login")
    def login() -> dict[str, bool]:
        return {"in": sign_in(request.get_data(as_text=True), "x") is not None}

    for typed in ("hunter2-my-password", "a\0b", "", "x" * 5000, "' OR 1=1 --"):
        assert client.post("/api/test-login", data=typed).json == {"in": False}
    rows = str(dump(database)["audit_logs"])
    assert "hunter2" not in rows
    assert "OR 1=1" not in rows


def test_sign_in_of_an_unknown_user_verifies_a_dummy_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    from aijobs.web import auth

    verified: list[str] = []

    class Counting:
        def verify(self, stored: str, given: bytes) -> bool:
            verified.append(stored)
            return True

    monkeypatch.setattr(auth, "_hasher", Counting())
    assert auth.verify_password(None, "x") is False
    assert len(verified) == 1
    assert verified[0].startswith("$argon2id$")


def test_unknown_targets_are_not_found(client: FlaskClient, operator: MakeOperator) -> None:
    headers = operator("SUPER_ADMIN").headers
    for job_id in (new_id(), "nonsense", "%00"):
        for method, rest in (("GET", ""), ("POST", "/retry"), ("POST", "/cancel")):
            answer = client.open(f"/admin-api/ai/jobs/{job_id}{rest}", method=method, headers=headers)
            assert (answer.status_code, answer.json["error"]["code"]) == (404, "JOB_NOT_FOUND")
        answer = client.post(f"/admin-api/ai/outbox/{job_id}/requeue", headers=headers)
        assert (answer.status_code, answer.json["error"]["code"]) == (404, "NOT_FOUND")


def test_every_admin_operation_has_a_permission_and_no_user_operation_has_one() -> None:
    assert all(operation.right for operation in admin.OPERATIONS)
    assert not any(operation.right for operation in user.OPERATIONS)
