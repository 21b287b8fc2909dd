"""The OpenAPI documents describe every route, every code and every answer correctly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from jsonschema import Draft202012Validator
from openapi_schema_validator import OAS31Validator

from aijobs.clock import utc_now
from aijobs.db.database import Database
from aijobs.errors import CODES
from aijobs.ids import InstanceId, new_id
from aijobs.job_types import flashcard_generation
from aijobs.learning.models import Flashcard
from aijobs.outbox.models import QueuePause
from aijobs.queues.presence import Presence
from aijobs.wiring.services import Services
from tests.support.rows import (
    BEGIN,
    add,
    build_artifacts,
    build_call,
    build_event,
    build_history,
    build_job,
    build_snapshot,
    ended,
    held,
)
from tests.web.api.conftest import Person, as_user

DOCUMENTS = ("/api/openapi.json", "/admin-api/openapi.json")


@pytest.fixture
def documents(client: FlaskClient) -> dict[str, Any]:
    return {path: client.get(path).json for path in DOCUMENTS}


def operations(documents: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    for document in documents.values():
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                yield method.upper(), path, operation, document


def test_documents_describe_exactly_the_routes(app: Flask, documents: dict[str, Any]) -> None:
    routed = {
        (method, rule.rule)
        for rule in app.url_map.iter_rules()
        if rule.rule.startswith(("/api/", "/admin-api/", "/internal/")) and rule.rule not in DOCUMENTS
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    as_rule = str.maketrans("{}", "<>")
    described = {(m, path.replace("Id}", "_id}").translate(as_rule)) for m, path, _, _ in operations(documents)}
    assert described == routed


def test_documents_are_valid_openapi(documents: dict[str, Any]) -> None:
    for document in documents.values():
        assert document["openapi"].startswith("3.1")
        for name, schema in document["components"]["schemas"].items():
            Draft202012Validator.check_schema(schema)
            assert name in str(document["paths"]) + str(document["components"]["schemas"]), name
    ids = [operation["operationId"] for _, _, operation, _ in operations(documents)]
    assert len(ids) == len(set(ids))


def test_documents_are_public(client: FlaskClient) -> None:
    for path in DOCUMENTS:
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.content_type == "application/json"


def check(documents: dict[str, Any], path: str, method: str, answer: Any) -> None:
    """Assert that the document describes the answer's status, and that the body matches the schema."""
    document = documents[DOCUMENTS[path.startswith("/admin-api")]]
    described = document["paths"][path][method.lower()]["responses"]
    assert str(answer.status_code) in described, (path, answer.status_code, answer.json)
    if "content" not in described[str(answer.status_code)]:
        assert answer.get_data() == b""
        return
    schema = described[str(answer.status_code)]["content"]["application/json"]["schema"]
    validator = OAS31Validator({**schema, "components": document["components"]})
    errors = [f"{list(e.absolute_path)}: {e.message}" for e in validator.iter_errors(answer.json)]
    assert not errors, (path, errors, answer.json)
    if answer.status_code >= 400:
        assert answer.json["error"]["code"] in CODES


@pytest.fixture
def full(database: Database, services: Services) -> dict[str, str]:
    """Add jobs in every state with all kinds of rows, a paused queue, a worker, and dead and unknown events."""
    instance = InstanceId.current()
    done = build_job(**ended("succeeded", artifact_count=1, output_hash="a" * 64, prompt_version="1"))
    failed = build_job(**ended("failed", internal_error_message="stack"))
    child = build_job(parent_job_id=failed.id, root_id=failed.id, trigger_type="admin", **ended("cancelled"))
    running = build_job(**held(locked_by=f"{instance}/x", lock_until=utc_now() + timedelta(minutes=1)))
    waiting = build_job(
        lifecycle_status="running", attempt_no=1, next_attempt_at=BEGIN, started_at=BEGIN, queue_name="ai-background"
    )
    lost = build_job(**held(locked_by="gone~b~1~7~5~ab/tok"))
    queued = build_job()
    jobs = (done, failed, child, running, waiting, lost, queued)
    dead = build_event(
        failed, event_type="ai.job.failed", status="dead", last_error="DISPATCH_FAILED: X", published_at=None
    )
    add(
        database,
        *jobs,
        *(build_event(job, last_sent_at=BEGIN) for job in jobs if job is not queued),
        build_event(queued, status="pending", published_at=None, available_at=BEGIN),
        build_event(done, event_type="ai.odd", last_error="UNKNOWN_EVENT_TYPE"),
        dead,
        *(build_snapshot(job, {"calls": [{}]}) for job in jobs),
        *build_artifacts(done, "f1"),
        *build_history(done, "created", "locked", "provider_called", "output_saved", "succeeded"),
        build_call(done),
        build_call(done, call_no=2, state="started", cost_micros=None, currency=None, billed="unknown"),
        build_call(failed, state="failed", error_code="PROVIDER_TIMEOUT", latency_ms=12, started_at=utc_now()),
        QueuePause(queue_name="ai-background", reason="full", paused_by="operator:x", paused_at=BEGIN),
    )
    Presence(services.broker.client, instance, "ai-interactive").beat()
    return {"done": done.id, "failed": failed.id, "child": child.id, "queued": queued.id, "dead": dead.id}


def test_real_answers_match_the_documents(
    client: FlaskClient, documents: dict[str, Any], full: dict[str, str], operator: Callable[[str], Person]
) -> None:
    seen: set[tuple[str, str]] = set()

    def ask(method: str, path: str, headers: dict[str, str], query: str = "", **options: Any) -> Any:
        described = path
        for name in ("failed", "done", "child", "queued", "none", "dead", "unknown", "key"):
            of = "{eventId}" if "outbox/<" in path else "{credentialId}" if "credentials/<" in path else "{jobId}"
            described = re.sub(r"/providers/\w+/", "/providers/{provider}/", described.replace(f"<{name}>", of))
            path = path.replace(f"<{name}>", full.get(name, new_id()))
        answer = client.open(path + query, method=method, headers=headers, **options)
        check(documents, described, method, answer)
        seen.add((method, described))
        return answer

    user = as_user()
    notes = {
        "lang": "en",
        "source": {"id": "note-1", "title": "Plants"},
        "segments": [{"sid": "s1", "text": "Photosynthesis is the process by which plants make food from light. " * 4}],
    }
    for job in ("<done>", "<failed>", "<child>", "<queued>", "<none>"):
        ask("GET", f"/api/ai/jobs/{job}", user)
    ask("GET", "/api/ai/jobs", user, "?limit=2")
    ask("GET", "/api/ai/jobs", {})
    ask("GET", "/api/ai/jobs", user, "?limit=x")
    made = ask("POST", "/api/learning/flashcards", {**user, "Idempotency-Key": "k"}, json=notes)
    assert made.status_code == 202, made.json
    assert made.headers["Location"] == f"/api/ai/jobs/{made.json['jobId']}"
    assert made.json["lifecycleStatus"] == "queued"
    again = ask("POST", "/api/learning/flashcards", {**user, "Idempotency-Key": "k"}, json=notes)
    assert (again.status_code, again.json["jobId"]) == (200, made.json["jobId"])
    other = ask("POST", "/api/learning/flashcards", {**user, "Idempotency-Key": "k"}, json={**notes, "lang": "zh"})
    assert (other.status_code, other.json["error"]["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")
    ask("POST", "/api/learning/flashcards", user, data=b"{", content_type="application/json")
    ask("POST", "/api/learning/flashcards", user, data=b"{}")
    ask("GET", "/api/learning/flashcards", user, f"?jobId={made.json['jobId']}")
    ask("GET", "/api/learning/flashcards", user, f"?jobId={full['done']}")
    for job in ("<queued>", "<done>", "<none>"):
        ask("POST", f"/api/ai/jobs/{job}/cancel", user)
        ask("POST", f"/api/ai/jobs/{job}/cancel", user, "?strict=true")
    stored = ask("POST", "/api/ai/credentials", user, json={"key": "sk-0123456789abcdef", "label": "Mine"})
    assert stored.status_code == 201
    full["key"] = stored.json["credentialId"]
    ask("POST", "/api/ai/credentials", user, json={"key": "a b", "base_url": "https://example.org"})
    ask("GET", "/api/ai/credentials", user)
    paid = ask("POST", "/api/learning/flashcards", user, json={**notes, "credentialId": full["key"]})
    assert paid.status_code == 202
    for headers in ({}, user, user):
        ask("DELETE", "/api/ai/credentials/<key>", headers)

    boss, viewer = operator("SUPER_ADMIN").headers, operator("VIEWER").headers
    for headers in (boss, viewer, user, {}):
        ask("GET", "/admin-api/ai/jobs", headers, "?limit=3")
        ask("GET", "/admin-api/ai/jobs/queues/status", headers)
        ask("GET", "/admin-api/ai/jobs/outbox/status", headers)
        ask("GET", "/admin-api/ai/workers", headers)
        ask("GET", "/admin-api/ai/providers", headers)
        ask("POST", "/admin-api/ai/providers/deepseek/breaker/close", headers)
        ask("POST", "/admin-api/ai/providers/nobody/breaker/close", headers)
        ask("GET", "/admin-api/ai/usage", headers, "?from=2026-02-01&to=2026-04-01")
        ask("GET", "/admin-api/ai/usage", headers, "?from=2020-01-01&to=2026-04-01")
        for job in ("<done>", "<failed>", "<child>", "<queued>", "<none>"):
            ask("GET", f"/admin-api/ai/jobs/{job}", headers)
        ask("POST", "/admin-api/ai/jobs/<done>/reveal", headers, json={"reason": "why not"})
        ask("POST", "/admin-api/ai/jobs/<done>/reveal", headers, json={})
        for event in ("<dead>", "<dead>", "<unknown>"):
            ask("POST", f"/admin-api/ai/outbox/{event}/requeue", headers)
        for job in ("<child>", "<child>", "<failed>", "<done>", "<none>"):
            ask("POST", f"/admin-api/ai/jobs/{job}/retry", headers, json={"reason": "again"})
            ask("POST", f"/admin-api/ai/jobs/{job}/cancel", headers, data="x", content_type="text/plain")
            ask("POST", f"/admin-api/ai/jobs/{job}/cancel", headers)
    assert seen == {(method, path) for method, path, _, _ in operations(documents)}


def test_described_request_schema_accepts_the_sample(documents: dict[str, Any]) -> None:
    document = documents["/api/openapi.json"]
    schema = {"$ref": "#/components/schemas/FlashcardRequest", "components": document["components"]}
    validator = OAS31Validator(schema)
    assert validator.is_valid(flashcard_generation.SAMPLE_INPUT)
    assert not validator.is_valid({**flashcard_generation.SAMPLE_INPUT, "userId": "u2"})
    assert not validator.is_valid({})


def test_cards_are_found_by_any_job_of_their_chain(
    client: FlaskClient, database: Database, documents: dict[str, Any]
) -> None:
    kind = {"job_type": "flashcard_generation"}
    first = build_job(**kind, **ended("failed"))
    child = build_job(
        parent_job_id=first.id, root_id=first.id, created_at=BEGIN + timedelta(1), **kind, **ended("succeeded")
    )
    cards = [
        Flashcard(
            user_id="u1",
            job_id=child.id,
            ordinal=n,
            card_type="basic",
            front=f"front {n}",
            back="back",
            tags=["t"],
            evidence=[{"sid": "s1", "quote": "q", "start": 0, "end": 1}],
            lang="en",
            source_id="n1",
            source_title="Plants",
            created_at=BEGIN,
        )
        for n in (1, 0)
    ]
    add(database, first, child, *cards)
    for job in (first, child):
        answer = client.get(f"/api/learning/flashcards?jobId={job.id}", headers=as_user())
        check(documents, "/api/learning/flashcards", "GET", answer)
        assert answer.json["job"]["jobId"] == child.id
        assert [card["front"] for card in answer.json["flashcards"]] == ["front 0", "front 1"]
        assert client.get(f"/api/learning/flashcards?jobId={job.id}", headers=as_user("u2")).status_code == 404


def test_broker_numbers_are_null_during_a_broker_outage(
    client: FlaskClient, documents: dict[str, Any], full: dict[str, str], operator: Callable[[str], Person], valkey: Any
) -> None:
    headers = operator("VIEWER").headers
    valkey.kill()
    queues = client.get("/admin-api/ai/jobs/queues/status", headers=headers)
    check(documents, "/admin-api/ai/jobs/queues/status", "GET", queues)
    assert {(queue["brokerDepth"], queue["workers"]) for queue in queues.json["queues"]} == {(None, None)}
    assert sum(queue["active"] for queue in queues.json["queues"]) == 2
    workers = client.get("/admin-api/ai/workers", headers=headers)
    check(documents, "/admin-api/ai/workers", "GET", workers)
    assert workers.json["brokerAway"] is True
    assert {worker["state"] for worker in workers.json["workers"]} == {"unknown"}
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json["broker"]) == (200, "away")
