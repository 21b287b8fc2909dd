"""Users' own keys over HTTP: answers, refusals and permissions."""

from __future__ import annotations

import hmac
import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from flask.testing import FlaskClient
from sqlalchemy import select, update

from aijobs import logs
from aijobs.credentials.models import UserModelCredential
from aijobs.db.database import Database
from aijobs.ids import new_id
from aijobs.jobs.models import AiJob
from aijobs.operators.models import AuditLog
from aijobs.settings import Settings
from aijobs.web.api import internal
from aijobs.web.factory import create_app
from aijobs.wiring.services import Services
from tests.web.api.conftest import Person, as_user

KEY = "sk-canary-0123456789abwxyz"
"""The last four characters aren't hex digits, so no id in an answer contains them by chance."""
TOKEN = "t" * 40
NOTES = {
    "lang": "en",
    "source": {"id": "note-1", "title": "Plants"},
    "segments": [{"sid": "s1", "text": "Photosynthesis is the process by which plants make food from light."}],
}
URL = "/api/ai/credentials"


def store(client: FlaskClient, user: str = "u1", **fields: Any) -> Any:
    return client.post(URL, json={"key": KEY, **fields}, headers=as_user(user))


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Collect all log lines at DEBUG level."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure("DEBUG", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


# --- users -------------------------------------------------------------------------------------------------------


def test_stored_key_never_appears_in_an_answer_log_or_message(
    client: FlaskClient, log: io.StringIO, redis_url: str
) -> None:
    made = store(client, label="Mine", mode="user_deepseek_key")
    assert made.status_code == 201
    assert made.headers["Cache-Control"] == "no-store"
    assert set(made.json) == {"credentialId", "mode", "label", "lastFour", "fingerprint", "createdAt"}
    assert (made.json["label"], made.json["lastFour"], made.json["mode"]) == ("Mine", "wxyz", "user_deepseek_key")
    listed = client.get(URL, headers=as_user())
    assert listed.json == {"credentials": [made.json]}
    headers = {**as_user(), "Idempotency-Key": "k"}
    job = client.post(
        "/api/learning/flashcards", json={**NOTES, "credentialId": made.json["credentialId"]}, headers=headers
    )
    assert job.status_code == 202
    gone = client.delete(f"{URL}/{made.json['credentialId']}", headers=as_user())
    assert (gone.status_code, gone.get_data()) == (204, b"")
    assert client.get(URL, headers=as_user()).json == {"credentials": []}
    for answer in (made, listed, job, gone, client.get(f"/api/ai/jobs/{job.json['jobId']}", headers=as_user())):
        assert KEY not in answer.get_data(as_text=True) + str(answer.headers)
    assert KEY not in log.getvalue()
    broker = redis.Redis.from_url(redis_url)
    dumped = b"".join(name + (broker.dump(name) or b"") for name in broker.scan_iter())
    broker.close()
    assert b"huey" in dumped
    assert KEY.encode() not in dumped


def test_label_and_mode_have_defaults_and_equal_keys_share_a_fingerprint(client: FlaskClient) -> None:
    first, second, other = store(client).json, store(client).json, store(client, key=f"{KEY}0").json
    assert (first["label"], first["mode"]) == ("DeepSeek", "user_deepseek_key")
    assert first["fingerprint"] == second["fingerprint"] != other["fingerprint"]
    assert store(client, "u2").json["fingerprint"] != first["fingerprint"]
    order = [each["credentialId"] for each in client.get(URL, headers=as_user()).json["credentials"]]
    assert order == [each["credentialId"] for each in (other, second, first)]


@pytest.mark.parametrize(
    "changes",
    [{"ciphertext": b"\x01" + b"x" * 60}, {"ciphertext": b""}, {"ciphertext": b"\x09" + b"x" * 60}, {"key_id": "gone"}],
)
def test_undecryptable_key_is_marked_in_the_list(
    client: FlaskClient, database: Database, changes: dict[str, Any]
) -> None:
    good, spoilt = store(client).json, store(client).json
    with database.transaction() as session:
        this = UserModelCredential.id == spoilt["credentialId"]
        session.execute(update(UserModelCredential).where(this).values(**changes))
    listed = client.get(URL, headers=as_user()).json["credentials"]
    assert listed == [{**spoilt, "unreadable": True}, good]


def test_eleventh_key_exceeds_the_quota(client: FlaskClient) -> None:
    assert {store(client).status_code for _ in range(10)} == {201}
    refused = store(client)
    assert refused.status_code == 429
    assert refused.json["error"]["code"] == "QUOTA_EXCEEDED"
    assert refused.json["error"]["details"] == {"limit": "credentials", "used": 10, "allowed": 10}
    assert "Retry-After" not in refused.headers
    assert store(client, "u2").status_code == 201


def test_another_users_key_and_an_unknown_key_get_identical_answers(client: FlaskClient, database: Database) -> None:
    mine = store(client).json["credentialId"]
    others = [
        client.delete(f"{URL}/{each}", headers=as_user("u2"))
        for each in (mine, new_id(), "x", mine.upper(), f"{mine} ", "..", "%00")
    ]
    assert {answer.status_code for answer in others} == {404}
    assert {answer.get_data() for answer in others[:3]} == {others[0].get_data()}
    used = [
        client.post("/api/learning/flashcards", json={**NOTES, "credentialId": each}, headers=as_user("u2"))
        for each in (mine, new_id())
    ]
    assert {answer.status_code for answer in used} == {422}
    assert used[0].get_data() == used[1].get_data()
    assert used[0].json["error"]["details"]["fields"][0]["field"] == "credentialId"
    with database.read() as session:
        assert session.execute(select(AiJob.id)).first() is None
    assert client.get(URL, headers=as_user("u2")).json == {"credentials": []}
    assert client.get(f"{URL}/{mine}", headers=as_user()).status_code == 405


def test_credentials_require_a_user_token(client: FlaskClient, operator: Callable[[str], Person]) -> None:
    mine = store(client).json["credentialId"]
    for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}, operator("SUPER_ADMIN").headers):
        assert client.get(URL, headers=headers).status_code == 401
        assert client.post(URL, json={"key": KEY}, headers=headers).status_code == 401
        assert client.delete(f"{URL}/{mine}", headers=headers).status_code == 401


ADDRESSES = (
    "http://169.254.169.254/",
    "http://2852039166",
    "http://0251.0376.0251.0376",
    "http://0xa9fea9fe",
    "http://[::ffff:127.0.0.1]",
    "http://0.0.0.0",
    "http://localhost.",
    "https://api.deepseek.com@attacker.example",
    "file:///etc/passwd",
    "gopher://127.0.0.1:6379/_FLUSHALL",
    "http://[fe80::1%25lo]",
    "http://127。0。0。1",
    "https://api.deepseek.com/../../",
)
FIELDS = (
    *(
        "base_url",
        "baseUrl",
        "baseURL",
        "BASE_URL",
        "url",
        "uri",
        "endpoint",
        "host",
        "hostname",
        "address",
        "api_base",
    ),
    *("provider", "model", "proxy", "proxies", "headers", "redirect", "port", "path", "callback", "extra_body"),
)


def test_request_cannot_choose_the_address_that_a_key_is_sent_to(client: FlaskClient, database: Database) -> None:
    mine = store(client).json["credentialId"]
    spelled = [(field, ADDRESSES[0]) for field in FIELDS] + [(FIELDS[0], address) for address in ADDRESSES]
    for field, address in spelled:
        notes = {**NOTES, "credentialId": mine, field: address}
        for refused in (
            store(client, **{field: address}),
            client.post("/api/learning/flashcards", json=notes, headers=as_user()),
        ):
            assert refused.status_code == 422
            assert [each["field"] for each in refused.json["error"]["details"]["fields"]] == [field]
            assert address not in refused.get_data(as_text=True)
    with database.read() as session:
        assert len(session.execute(select(UserModelCredential.id)).all()) == 1
        assert session.execute(select(AiJob.id)).first() is None


BAD: dict[str, tuple[dict[str, Any], int]] = {
    "no body": ({}, 415),
    "a form": ({"data": {"key": KEY}}, 415),
    "text": ({"data": json.dumps({"key": KEY}), "content_type": "text/plain"}, 415),
    "another charset": ({"data": b"{}", "content_type": "application/json; charset=utf-16"}, 415),
    "not JSON": ({"data": f'{{"key": "{KEY}"', "content_type": "application/json"}, 400),
    "a list": ({"json": [KEY]}, 400),
    "twice": ({"data": f'{{"key": "{KEY}", "key": "{KEY}"}}', "content_type": "application/json"}, 400),
    "deep": ({"data": '{"key":' + "[" * 40 + "]" * 40 + "}", "content_type": "application/json"}, 400),
    "nothing in it": ({"json": {}}, 422),
    "null": ({"json": {"key": None}}, 422),
    "a number": ({"json": {"key": 12345678}}, 422),
    "an object": ({"json": {"key": {"key": KEY}}}, 422),
    "short": ({"json": {"key": KEY[:7]}}, 422),
    "long": ({"json": {"key": KEY * 20}}, 422),
    "spaces": ({"json": {"key": f" {KEY}"}}, 422),
    "a line": ({"json": {"key": f"{KEY}\r\nX-Injected: 1"}}, 422),
    "NUL": ({"json": {"key": f"{KEY}\0"}}, 422),
    "half a pair": ({"data": json.dumps({"key": f"{KEY}\ud800"}), "content_type": "application/json"}, 422),
    "wide characters": ({"json": {"key": "ｓｋ－" + KEY}}, 422),
    "a label that holds the key": ({"json": {"key": KEY, "label": f"x{KEY}"}}, 422),
    "a label that is long": ({"json": {"key": KEY, "label": "l" * 101}}, 422),
    "a label that is none": ({"json": {"key": KEY, "label": None}}, 422),
    "the platform's mode": ({"json": {"key": KEY, "mode": "platform_key"}}, 422),
    "a mode of another kind": ({"json": {"key": KEY, "mode": {}}}, 422),
    "a parameter": ({"json": {"key": KEY}, "query_string": {"key": "x"}}, 422),
    "too large": ({"json": {"key": KEY, "label": "l" * 1_000_001}}, 413),
}


@pytest.mark.parametrize(("sent", "status"), BAD.values(), ids=BAD.keys())
def test_invalid_request_is_refused_without_repeating_its_key(
    client: FlaskClient, database: Database, log: io.StringIO, sent: dict[str, Any], status: int
) -> None:
    refused = client.post(URL, headers=as_user(), **sent)
    assert refused.status_code == status
    assert KEY not in refused.get_data(as_text=True)
    assert KEY not in log.getvalue()
    with database.read() as session:
        assert session.execute(select(UserModelCredential.id)).first() is None


@pytest.mark.parametrize("value", [None, 1, True, [], {}, "", "x" * 300, "\0", "1' OR '1'='1"])
def test_invalid_credential_id_is_named(client: FlaskClient, value: Any) -> None:
    refused = client.post("/api/learning/flashcards", json={**NOTES, "credentialId": value}, headers=as_user())
    assert refused.status_code == 422
    assert {each["field"] for each in refused.json["error"]["details"]["fields"]} == {"credentialId"}


def test_same_idempotency_key_with_another_credential_is_refused(client: FlaskClient) -> None:
    mine = store(client).json["credentialId"]
    headers = {**as_user(), "Idempotency-Key": "k"}
    first = client.post("/api/learning/flashcards", json={**NOTES, "credentialId": mine}, headers=headers)
    again = client.post("/api/learning/flashcards", json={**NOTES, "credentialId": mine}, headers=headers)
    assert (first.status_code, again.status_code) == (202, 200)
    other = client.post("/api/learning/flashcards", json=NOTES, headers=headers)
    assert other.json["error"]["code"] == "IDEMPOTENCY_KEY_REUSED"
    client.delete(f"{URL}/{mine}", headers=as_user())
    late = client.post("/api/learning/flashcards", json={**NOTES, "credentialId": mine}, headers=headers)
    assert (late.status_code, late.json["jobId"]) == (200, first.json["jobId"])


# --- runtime services --------------------------------------------------------------------------------------------


@pytest.fixture
def service(services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> FlaskClient:
    """A client of an application with a service token."""
    monkeypatch.setattr(internal, "_sparing", logs.Sparing())
    return create_app(services=replace(services, settings=replace(settings, service_token=TOKEN))).test_client()


def resolve(client: FlaskClient, credential_id: str, token: str | None = TOKEN, **options: Any) -> Any:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return client.post(f"/internal/credentials/{credential_id}/resolve", headers=headers, **options)


def audited(database: Database) -> list[tuple[str, str, str, str, Any]]:
    with database.read() as session:
        rows = session.execute(select(AuditLog).order_by(AuditLog.at, AuditLog.id)).scalars().all()
        assert KEY not in str([vars(row) for row in rows])
        return [(row.actor, row.action, row.target_type, row.target_id, row.after) for row in rows]


def test_service_token_resolves_the_key_and_writes_an_audit_row(
    service: FlaskClient, database: Database, log: io.StringIO
) -> None:
    mine = store(service).json["credentialId"]
    answer = resolve(service, mine)
    assert answer.status_code == 200
    assert answer.json == {"credentialId": mine, "userId": "u1", "mode": "user_deepseek_key", "apiKey": KEY}
    assert answer.headers["Cache-Control"] == "no-store"
    assert audited(database) == [
        ("service", "credential.resolve", "credential", mine, {"userId": "u1", "mode": "user_deepseek_key"})
    ]
    assert service.get(URL, headers=as_user()).json["credentials"][0]["lastUsedAt"].endswith("Z")
    assert KEY not in log.getvalue()
    assert TOKEN not in log.getvalue()


def test_resolve_is_not_found_without_a_configured_token(client: FlaskClient) -> None:
    mine = store(client).json["credentialId"]
    unknown = client.post("/internal/anything", headers={"Authorization": f"Bearer {TOKEN}"})
    for token in (TOKEN, "", None):
        answer = resolve(client, mine, token)
        assert (answer.status_code, answer.get_data()) == (404, unknown.get_data())


def test_wrong_service_token_is_unauthorized_and_logged_once(
    service: FlaskClient, database: Database, operator: Callable[[str], Person], log: io.StringIO
) -> None:
    mine = store(service).json["credentialId"]
    boss = operator("SUPER_ADMIN").headers["Authorization"].removeprefix("Bearer ")
    user = as_user()["Authorization"].removeprefix("Bearer ")
    tokens = (None, "", "x", TOKEN[:-1], TOKEN + "t", TOKEN.upper(), "é" * 40, boss, user)
    bodies = set()
    for token in tokens:
        for credential_id in (mine, new_id(), "x"):
            answer = resolve(service, credential_id, token.encode().decode("latin-1") if token else token)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            bodies.add(answer.get_data())
    assert len(bodies) == 1
    assert audited(database) == []
    assert log.getvalue().count("internal.token_refused") == 1


def test_service_token_is_compared_in_constant_time(service: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    really = hmac.compare_digest

    def compare(given: str, wanted: str) -> bool:
        compared.append((len(given), len(wanted)))
        return really(given, wanted)

    monkeypatch.setattr(internal.hmac, "compare_digest", compare)
    assert resolve(service, new_id(), "short").status_code == 401
    assert (64, 64) in compared, "both digests have the same length"


def test_failed_resolve_is_audited(service: FlaskClient, database: Database) -> None:
    mine, unknown = store(service).json["credentialId"], new_id()
    with database.transaction() as session:
        session.execute(update(UserModelCredential).values(ciphertext=b"\x01garbled"))
    answers = [resolve(service, mine), resolve(service, unknown), resolve(service, "x")]
    assert [(each.status_code, each.json["error"]["code"]) for each in answers] == [
        (409, "CREDENTIAL_UNREADABLE"),
        (404, "NOT_FOUND"),
        (404, "NOT_FOUND"),
    ]
    assert [row[3:] for row in audited(database)] == [
        (mine, {"refused": "CREDENTIAL_UNREADABLE"}),
        (unknown, {"refused": "NOT_FOUND"}),
    ]


def test_key_is_not_returned_if_the_audit_row_cannot_be_written(
    service: FlaskClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = store(service).json["credentialId"]
    service.application.config["PROPAGATE_EXCEPTIONS"] = False

    def fail(*_args: Any, **_more: Any) -> Any:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(services.database, "write", fail)
    answer = resolve(service, mine)
    assert answer.status_code == 500
    assert KEY not in answer.get_data(as_text=True)


def test_resolve_with_content_or_another_method_is_refused(service: FlaskClient) -> None:
    mine = store(service).json["credentialId"]
    assert resolve(service, mine, json={}).status_code == 200
    assert resolve(service, mine, json={"base_url": "https://attacker.example"}).status_code == 422
    assert resolve(service, mine, data=b"x").status_code == 415
    assert resolve(service, mine, query_string={"reveal": "1"}).status_code == 422
    got = service.get(f"/internal/credentials/{mine}/resolve", headers={"Authorization": f"Bearer {TOKEN}"})
    assert got.status_code == 405


def test_operators_see_the_credential_id_of_a_job_and_nothing_else_of_it(
    client: FlaskClient, operator: Callable[[str], Person]
) -> None:
    mine = store(client).json
    job = client.post(
        "/api/learning/flashcards", json={**NOTES, "credentialId": mine["credentialId"]}, headers=as_user()
    )
    boss = operator("SUPER_ADMIN").headers
    detail = client.get(f"/admin-api/ai/jobs/{job.json['jobId']}", headers=boss)
    assert detail.json["credentialId"] == mine["credentialId"]
    assert detail.json["credentialMode"] == "user_deepseek_key"
    shown = detail.get_data(as_text=True) + str(client.get("/admin-api/openapi.json").json)
    for secret in (KEY, mine["fingerprint"], "wxyz"):
        assert secret not in shown.replace(mine["credentialId"], "")
    assert "/credentials" not in shown
