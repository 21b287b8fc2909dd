"""What must be the same on SQLite, PostgreSQL and MariaDB, asked from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from aijobs.settings import KeyRing, Settings
from tests.support.processes import Run
from tests.support.rows import prepare_database
from tests.web.api.conftest import SECRET, Person, as_user

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
    )


def ask(client: FlaskClient, key: str, body: Any = NOTES, user: str = "u1") -> Any:
    header = {"HTTP_IDEMPOTENCY_KEY": key.encode().decode("latin-1")}
    return client.post("/api/learning/flashcards", json=body, headers=as_user(user), environ_overrides=header)


def test_keys_that_differ_in_case_accent_width_or_form_are_different_jobs(client: FlaskClient) -> None:
    keys = ["Order-A", "order-a", "ORDER-A", "ordér-a", "orde\u0301r-a", "straße", "strasse", "Ａ", "A", "💡" * 255]
    made = {key: ask(client, key) for key in keys}
    assert {answer.status_code for answer in made.values()} == {202}
    assert len({answer.json["jobId"] for answer in made.values()}) == len(keys)
    for key, answer in made.items():
        again = ask(client, key)
        assert (again.status_code, again.json["jobId"]) == (200, answer.json["jobId"])
    for refused in (" k", "k ", "k\u00a0", "\u3000k", "k\t", "k" * 256):
        assert ask(client, refused).status_code == 422


def test_a_job_is_found_by_its_exact_id_and_user_alone(client: FlaskClient) -> None:
    job_id = ask(client, "k", user="Müller").json["jobId"]
    assert client.get(f"/api/ai/jobs/{job_id}", headers=as_user("Müller")).status_code == 200
    assert client.get(f"/api/ai/jobs/{job_id.upper()}", headers=as_user("Müller")).status_code == 404
    for other in ("müller", "Muller", "MÜLLER"):
        assert client.get(f"/api/ai/jobs/{job_id}", headers=as_user(other)).status_code == 404
        assert client.post(f"/api/ai/jobs/{job_id}/cancel", headers=as_user(other)).status_code == 404


def test_a_job_goes_its_way_from_request_to_cancel_to_retry(
    client: FlaskClient, operator: Callable[[str], Person]
) -> None:
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
