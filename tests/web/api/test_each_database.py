"""Requests that must have the same answer on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from flask.testing import FlaskClient

from aijobs.settings import KeyRing, Settings
from aijobs.web.api.admin import OPERATIONS as OF_OPERATORS
from aijobs.web.api.user import OPERATIONS as OF_USERS
from tests.support.databases import OTHERS_LATER
from tests.support.odd_texts import ODD_TEXTS
from tests.support.processes import Run
from tests.support.rows import prepare_database
from tests.web.api.conftest import SECRET, Person, as_user, user_token
from tests.web.api.test_bad_input import ADMIN_PARAMETERS, NAMED, PARAMETERS, UNREADABLE

NOTES = {
    "lang": "en",
    "source": {"id": "note-1", "title": "Plants"},
    "segments": [{"sid": "s1", "text": "Photosynthesis is the process by which plants make food from light."}],
}


@pytest.fixture
def settings(create_database: Callable[..., str], redis_url: str, run: Run) -> Settings:
    return Settings(
        instance_path=run.new_folder("web"),
        database_url=create_database(prepare_database),
        redis_url=redis_url,
        secret_key="s" * 32,
        jwt_secret=SECRET,
        message_keys=KeyRing((("k1", b"m" * 32),)),
        credential_keys=KeyRing((("c1", b"c" * 32),)),
    )


def ask(client: FlaskClient, key: str, body: Any = NOTES, user: str = "u1") -> Any:
    header = {"HTTP_IDEMPOTENCY_KEY": key.encode().decode("latin-1")}
    return client.post("/api/learning/flashcards", json=body, headers=as_user(user), environ_overrides=header)


def test_keys_that_differ_in_case_accent_width_or_form_make_different_jobs(client: FlaskClient) -> None:
    keys = ["Order-A", "order-a", "ORDER-A", "ordér-a", "orde\u0301r-a", "straße", "strasse", "Ａ", "A", "💡" * 255]
    made = {key: ask(client, key) for key in keys}
    assert {answer.status_code for answer in made.values()} == {202}
    assert len({answer.json["jobId"] for answer in made.values()}) == len(keys)
    for key, answer in made.items():
        again = ask(client, key)
        assert (again.status_code, again.json["jobId"]) == (200, answer.json["jobId"])
    for refused in (" k", "k ", "k\u00a0", "\u3000k", "k\t", "k" * 256):
        assert ask(client, refused).status_code == 422


def test_job_is_found_only_by_its_exact_id_and_user(client: FlaskClient) -> None:
    job_id = ask(client, "k", user="Müller").json["jobId"]
    assert client.get(f"/api/ai/jobs/{job_id}", headers=as_user("Müller")).status_code == 200
    assert client.get(f"/api/ai/jobs/{job_id.upper()}", headers=as_user("Müller")).status_code == 404
    for other in ("müller", "Muller", "MÜLLER"):
        assert client.get(f"/api/ai/jobs/{job_id}", headers=as_user(other)).status_code == 404
        assert client.post(f"/api/ai/jobs/{job_id}/cancel", headers=as_user(other)).status_code == 404


def test_job_is_created_cancelled_and_retried(client: FlaskClient, operator: Callable[[str], Person]) -> None:
    boss = operator("OPERATOR").headers
    made = ask(client, "k")
    assert (made.status_code, made.json["lifecycleStatus"]) == (202, "queued")
    path = made.headers["Location"]
    cancelled = client.post(f"{path}/cancel", headers=as_user())
    assert (cancelled.json["lifecycleStatus"], cancelled.json["phase"]) == ("cancelled", "cancelled")
    assert "cancelRequestedAt" in cancelled.json
    assert client.post(f"{path}/cancel", headers=as_user()).json == cancelled.json
    child = client.post(f"/admin-api{path.removeprefix('/api')}/retry", headers=boss)
    assert child.status_code == 201
    again = client.post(f"/admin-api{path.removeprefix('/api')}/retry", headers=boss)
    assert (again.status_code, again.json["jobId"]) == (200, child.json["jobId"])
    assert client.get(path, headers=as_user()).json["retriedAs"] == child.json["jobId"]
    detail = client.get(f"/admin-api/ai/jobs/{child.json['jobId']}", headers=boss).json
    assert [link["jobId"] for link in detail["chain"]] == [made.json["jobId"], child.json["jobId"]]
    assert [entry["type"] for entry in detail["history"]] == ["created"]
    assert detail["triggerType"] == "admin"
    old = client.get(f"/admin-api/ai/jobs/{made.json['jobId']}", headers=boss).json
    assert [entry["type"] for entry in old["history"]] == ["created", "cancel_requested", "cancelled"]
    assert old["snapshot"]["contentHash"] == detail["snapshot"]["contentHash"]


def test_every_database_refuses_the_same_invalid_requests(
    client: FlaskClient, operator: Callable[[str], Person]
) -> None:
    """Databases accept different texts: PostgreSQL refuses a NUL that SQLite stores, MariaDB a lone surrogate."""
    boss, user = operator("SUPER_ADMIN").headers, as_user()
    for body, field in NAMED.values():
        answer = client.post("/api/learning/flashcards", data=body, content_type="application/json", headers=user)
        assert (answer.status_code, answer.json["error"]["code"]) == (422, "INPUT_INVALID"), field
    for body in UNREADABLE.values():
        answer = client.post("/api/learning/flashcards", data=body, content_type="application/json", headers=user)
        assert answer.status_code == 400, body[:40]
    for path in PARAMETERS:
        assert client.get(path, headers=user).status_code == 422, path
    for query in ADMIN_PARAMETERS:
        assert client.get(f"/admin-api/ai/jobs?{query}", headers=boss).status_code == 422, query


@OTHERS_LATER
def test_odd_text_in_any_part_of_a_request_causes_no_server_error(
    client: FlaskClient, operator: Callable[[str], Person]
) -> None:
    """Try every path and parameter, and the headers that are stored in the database."""
    boss, user = operator("SUPER_ADMIN").headers, as_user()
    job_id = ask(client, "k").json["jobId"]
    for text in ODD_TEXTS.values():
        encoded, odd = quote(text), text.decode("latin-1")
        for operation in (*OF_USERS, *OF_OPERATORS):
            path = re.sub(r"{[^}]*}", encoded, operation.path)
            headers = boss if operation in OF_OPERATORS else user
            for query in ["", *(f"?{name}={encoded}" for name in operation.parameters)]:
                answer = client.open(path + query, method=operation.method, headers=headers)
                assert answer.status_code < 500, (operation.path, query)
        environ = {"HTTP_USER_AGENT": odd, "REMOTE_ADDR": odd, "HTTP_IDEMPOTENCY_KEY": odd}
        cancelled = client.post(f"/admin-api/ai/jobs/{job_id}/cancel", headers=boss, environ_overrides=environ)
        assert cancelled.status_code == 200, text
        client.post("/api/learning/flashcards", json=NOTES, headers=user, environ_overrides=environ)
        for token in (odd, f"ajo_{odd}", user_token(odd)):
            environ = {"HTTP_AUTHORIZATION": f"Bearer {token}"}
            assert client.get("/api/ai/jobs", environ_overrides=environ).status_code < 500, text
            assert client.get("/admin-api/ai/jobs", environ_overrides=environ).status_code < 500, text
