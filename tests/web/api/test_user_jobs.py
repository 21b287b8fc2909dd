"""A user's own jobs: visible fields, hidden fields and permissions."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from flask.testing import FlaskClient

from aijobs.db.database import Database
from aijobs.ids import new_id
from aijobs.learning.models import Flashcard
from tests.support.rows import (
    BEGIN,
    add,
    build_artifacts,
    build_event,
    build_history,
    build_job,
    build_snapshot,
    ended,
    held,
)
from tests.web.api.conftest import as_user

ALWAYS = {
    "jobId",
    "jobType",
    "lifecycleStatus",
    "phase",
    "queueName",
    "priority",
    "progress",
    "attempt",
    "createdAt",
}

STATES = {
    "created": ({}, False, set()),
    "queued": ({}, True, {"queuedAt"}),
    "running": (held(), True, {"queuedAt", "startedAt"}),
    "retrying": (
        held(locked_by=None, locked_at=None, lock_until=None, next_attempt_at=BEGIN + timedelta(minutes=1)),
        True,
        {"queuedAt", "startedAt", "nextAttemptAt"},
    ),
    "cancel_requested": (
        held(cancel_requested_at=BEGIN, cancel_requested_by="user:u1"),
        True,
        {"queuedAt", "startedAt", "cancelRequestedAt"},
    ),
    "succeeded": (ended("succeeded"), True, {"queuedAt", "startedAt", "finishedAt", "result"}),
    "failed": (
        ended("failed"),
        True,
        {"queuedAt", "startedAt", "finishedAt", "errorCode", "publicErrorMessage"},
    ),
    "cancelled": (
        ended("cancelled", cancel_requested_at=BEGIN, cancel_requested_by="user:u1"),
        True,
        {"queuedAt", "startedAt", "finishedAt", "cancelRequestedAt"},
    ),
}


@pytest.mark.parametrize("phase", STATES)
def test_job_has_exactly_the_keys_of_its_state_and_no_null(client: FlaskClient, database: Database, phase: str) -> None:
    fields, published, keys = STATES[phase]
    job = build_job(**fields)
    add(database, job, *([build_event(job)] if published else []))
    answer = client.get(f"/api/ai/jobs/{job.id}", headers=as_user())
    assert answer.status_code == 200
    body = answer.json
    assert set(body) == ALWAYS | keys
    assert body["phase"] == phase
    assert None not in body.values()
    assert all(body[key].endswith("Z") for key in body if key.endswith("At"))
    (listed,) = client.get("/api/ai/jobs", headers=as_user()).json["jobs"]
    assert listed == body


def test_retried_job_names_its_child(client: FlaskClient, database: Database) -> None:
    parent = build_job(**ended("failed"))
    child = build_job(parent_job_id=parent.id, root_id=parent.id, trigger_type="admin")
    add(database, parent, child)
    assert client.get(f"/api/ai/jobs/{parent.id}", headers=as_user()).json["retriedAs"] == child.id
    assert "retriedAs" not in client.get(f"/api/ai/jobs/{child.id}", headers=as_user()).json


def test_result_lists_artifacts_in_creation_order(client: FlaskClient, database: Database) -> None:
    job = build_job(**ended("succeeded", artifact_count=3))
    add(database, job, *build_artifacts(job, "z", "a", "m"))
    result = client.get(f"/api/ai/jobs/{job.id}", headers=as_user()).json["result"]
    assert result == {
        "artifactCount": 3,
        "artifacts": [{"artifactType": "Flashcard", "artifactId": each} for each in "zam"],
    }


def test_texts_of_a_card_are_returned_unescaped_as_json(client: FlaskClient, database: Database) -> None:
    texts = {"front": "What does <title> hold, if a<b and c>d?", "back": "<iframe src=x>List<String>"}
    job = build_job(job_type="flashcard_generation", **ended("succeeded"))
    add(database, job)
    values = {"tags": ["<script src=//x.example "], "difficulty": "easy", "evidence": [], "lang": "en"}
    source = {"source_id": "n", "source_title": "<b>", "created_at": BEGIN}
    add(database, Flashcard(user_id="u1", job_id=job.id, ordinal=0, card_type="basic", **texts, **values, **source))

    answer = client.get(f"/api/learning/flashcards?jobId={job.id}", headers=as_user())

    (card,) = answer.get_json()["flashcards"]
    assert {name: card[name] for name in texts} == texts
    assert (card["tags"], card["source"]["title"]) == (["<script src=//x.example "], "<b>")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_queued_at_is_the_time_of_the_first_event(client: FlaskClient, database: Database) -> None:
    job = build_job(**held(attempt_no=2))
    later = build_event(
        job, created_at=BEGIN + timedelta(minutes=1), published_at=BEGIN + timedelta(minutes=2), id=new_id()
    )
    add(database, job, later, build_event(job))
    assert client.get(f"/api/ai/jobs/{job.id}", headers=as_user()).json["queuedAt"] == "2026-03-01T08:00:02.000Z"


CANARIES = {
    "output": "CANARY-OUTPUT",
    "internal": "CANARY-INTERNAL",
    "snapshot": "CANARY-SNAPSHOT",
    "outbox": "CANARY-OUTBOX",
    "holder": "CANARY-HOLDER",
    "key": "CANARY-KEY",
    "faults": "CANARY-FAULTS",
}


@pytest.mark.parametrize("state", ["queued", "running", "succeeded", "failed", "cancelled"])
def test_private_values_are_in_no_body_header_or_error(client: FlaskClient, database: Database, state: str) -> None:
    fields = {"queued": {}, "running": held()}.get(state) or (ended(state) if state != "queued" else {})
    if state == "running":
        fields["locked_by"] = CANARIES["holder"]
    job = build_job(
        **fields,
        validated_output={"x": CANARIES["output"]},
        internal_error_message=CANARIES["internal"],
        public_error_message="stored English text",
        idempotency_key=CANARIES["key"],
        output_hash="CANARY" + "0" * 58,
    )
    event = build_event(job, last_error=CANARIES["outbox"], payload={"x": CANARIES["outbox"]})
    add(database, job, event, build_snapshot(job, {"x": CANARIES["snapshot"]}), *build_history(job, "created"))
    for method, path in (
        ("GET", f"/api/ai/jobs/{job.id}"),
        ("GET", "/api/ai/jobs"),
        ("GET", f"/api/ai/jobs/{job.id}?x=1"),
        ("POST", f"/api/ai/jobs/{job.id}/cancel?strict=true"),
        ("GET", f"/api/learning/flashcards?jobId={job.id}"),
    ):
        answer = client.open(path, method=method, headers=as_user())
        assert "CANARY" not in answer.get_data(as_text=True) + str(answer.headers), (method, path)


@pytest.mark.parametrize("owner", ["u2", "U1", "u1x", "u", "0", "1", "01", "system"])
@pytest.mark.parametrize("state", ["queued", "succeeded", "failed"])
def test_another_users_job_and_an_unknown_job_get_identical_answers(
    client: FlaskClient, database: Database, owner: str, state: str
) -> None:
    job = build_job(user_id=owner, **(ended(state) if state != "queued" else {}))
    add(database, job, build_event(job))

    def all_of(job_id: str) -> list[tuple[int, bytes, list[tuple[str, str]]]]:
        asked = (
            ("GET", f"/api/ai/jobs/{job_id}"),
            ("POST", f"/api/ai/jobs/{job_id}/cancel"),
            ("POST", f"/api/ai/jobs/{job_id}/cancel?strict=true"),
            ("GET", f"/api/learning/flashcards?jobId={job_id}"),
        )
        answers = [client.open(path, method=method, headers=as_user("u1")) for method, path in asked]
        return [(a.status_code, a.get_data(), sorted(a.headers)) for a in answers]

    strangers = all_of(job.id)
    assert [status for status, _, _ in strangers] == [404] * 4
    assert json.loads(strangers[0][1])["error"]["code"] == "JOB_NOT_FOUND"
    for nothing in (new_id(), "nonsense", job.id.upper(), "1" * 300, "%00", "%F0%9F%92%A9"):
        assert all_of(nothing) == strangers, nothing
    assert client.get("/api/ai/jobs", headers=as_user("u1")).json == {"jobs": []}


def test_cancel_of_a_final_job_changes_nothing(client: FlaskClient, database: Database) -> None:
    for state in ("succeeded", "failed", "cancelled"):
        job = build_job(**ended(state))
        add(database, job)
        before = client.get(f"/api/ai/jobs/{job.id}", headers=as_user()).json
        for _ in range(2):
            answer = client.post(f"/api/ai/jobs/{job.id}/cancel", headers=as_user())
            assert (answer.status_code, answer.json) == (200, before)
        strict = client.post(f"/api/ai/jobs/{job.id}/cancel?strict=true", headers=as_user())
        assert strict.status_code == 409
        code = "JOB_ALREADY_CANCELLED" if state == "cancelled" else "JOB_NOT_CANCELLABLE"
        assert strict.json["error"]["code"] == code


def test_pages_show_each_job_once_if_all_have_the_same_creation_time(client: FlaskClient, database: Database) -> None:
    jobs = [build_job() for _ in range(23)]
    add(database, *jobs, build_job(user_id="u2"))
    seen: list[str] = []
    cursor = ""
    while True:
        body = client.get(f"/api/ai/jobs?limit=7{cursor}", headers=as_user()).json
        seen += [job["jobId"] for job in body["jobs"]]
        if "nextCursor" not in body:
            break
        cursor = f"&cursor={body['nextCursor']}"
        add(database, build_job(created_at=BEGIN + timedelta(days=1)))  # Newer jobs don't shift the pages.
    assert seen == sorted((job.id for job in jobs), reverse=True)


def test_cursor_of_another_user_is_refused(client: FlaskClient, database: Database) -> None:
    add(database, *(build_job() for _ in range(3)), *(build_job(user_id="u2") for _ in range(3)))
    cursor = client.get("/api/ai/jobs?limit=1", headers=as_user()).json["nextCursor"]
    answer = client.get(f"/api/ai/jobs?cursor={cursor}", headers=as_user("u2"))
    assert answer.status_code == 422
    assert answer.json["error"]["details"]["fields"][0]["field"] == "cursor"


def test_messages_are_in_the_requested_language(client: FlaskClient, database: Database) -> None:
    job = build_job(**ended("failed", public_error_message="English as it was stored"))
    add(database, job)
    chinese = client.get(f"/api/ai/jobs/{job.id}", headers={**as_user(), "Accept-Language": "zh-CN,en;q=0.5"})
    assert chinese.json["publicErrorMessage"].startswith("AI 服务无法连接")
    assert chinese.headers["Content-Language"] == "zh"
    assert client.get("/api/none", headers={"Accept-Language": "zh"}).json["error"]["message"] == "这里什么都没有。"
    french = client.get(f"/api/ai/jobs/{job.id}", headers={**as_user(), "Accept-Language": "fr"})
    assert french.json["publicErrorMessage"].startswith("The AI service can't be reached")


def test_jobs_cannot_be_created_at_the_general_path(client: FlaskClient) -> None:
    answer = client.post("/api/ai/jobs", headers=as_user(), json={})
    assert answer.status_code == 405
    assert answer.json["error"]["code"] == "METHOD_NOT_ALLOWED"
    assert "GET" in answer.headers["Allow"]
