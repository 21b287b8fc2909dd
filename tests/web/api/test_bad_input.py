"""Invalid requests: the answer is a 4xx that names the error, no row is written, and nothing is a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import func, select

from aijobs.canonical import MAX_DEPTH
from aijobs.db.database import Database
from aijobs.jobs.models import AiJob, AiJobSnapshot, QuotaUsage
from aijobs.monitor.filters import PARAMETERS as JOB_FILTERS
from aijobs.monitor.usage_filter import PARAMETERS as USAGE_FILTERS
from aijobs.operators.models import AuditLog
from aijobs.outbox.models import OutboxEvent
from aijobs.settings import Settings
from aijobs.web.api import admin
from tests.support.rows import add, build_job, ended
from tests.web.api.conftest import as_user

GOOD: dict[str, Any] = {
    "lang": "en",
    "source": {"id": "note-1", "title": "Plants"},
    "segments": [{"sid": "s1", "text": "Photosynthesis is the process by which plants make food from light."}],
}
PATH = "/api/learning/flashcards"


def changed(path: str, value: Any) -> bytes:
    """Return the valid body with `value` at `path`, as JSON."""
    body = json.loads(json.dumps(GOOD))
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner = body
    for part in way:
        inner = inner[part]
    inner[last] = value
    return json.dumps(body).encode()


UNREADABLE = {
    "no JSON": b"{",
    "nothing": b"",
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": [-Infinity]}',
    "a key twice": b'{"lang": "en", "lang": "zh"}',
    "a key twice below": b'{"source": {"id": "a", "id": "b"}}',
    "not UTF-8": b'{"lang": "\xff"}',
    "UTF-16": '{"lang": "en"}'.encode("utf-16"),
    "a mark before it": b'\xef\xbb\xbf{"lang": "en"}',
    "an array": b"[]",
    "a text": b'"x"',
    "null": b"null",
    "two documents": b"{} {}",
    "deep arrays": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep within reason": b'{"a":' + b"[" * 30 + b"]" * 30 + b"}",
    "quotes without end": b'{"a": "' + b'\\"' * 200_000,
    "quotes upon quotes": b'"' * 300_001,
}


@pytest.fixture
def nothing_is_left(database: Database) -> Any:
    yield
    with database.read() as session:
        for table in (AiJob, AiJobSnapshot, OutboxEvent, QuotaUsage):
            assert session.execute(select(func.count()).select_from(table)).scalar() == 0, table


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_body_is_a_bad_request(client: FlaskClient, body: bytes) -> None:
    answer = client.post(PATH, data=body, content_type="application/json", headers=as_user())
    assert answer.status_code == 400
    assert answer.json["error"]["code"] == "BAD_REQUEST"
    assert set(answer.json["error"]["details"]) == {"reason"}


@pytest.mark.usefixtures("nothing_is_left")
def test_all_depths_beyond_the_limit_get_the_same_answer(client: FlaskClient) -> None:
    """The parser and the store must share one limit, otherwise depths between two limits get another answer."""
    answers = {}
    for levels in range(MAX_DEPTH - 1, MAX_DEPTH + 5):
        deep = b'{"source":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"
        answers[levels] = client.post(PATH, data=deep, content_type="application/json", headers=as_user())
    assert [answers[levels].status_code for levels in answers] == [422, 422, 400, 400, 400, 400]
    beyond = [answers[levels].json for levels in answers if levels > MAX_DEPTH]
    assert beyond == [beyond[0]] * len(beyond)
    assert beyond[0]["error"]["details"] == {"reason": "too_deep"}


NAMED = {
    "NUL in a text": (changed("segments.0.text", "a\0b"), "segments[0].text"),
    "NUL in a name": (b'{"source": {"a\\u0000": 1}}', "source"),
    "half a pair": (b'{"source": {"title": "\\ud800"}}', "source.title"),
    "half a pair in a name": (b'{"\\udfff": 1}', "(body)"),
    "an integer too large": (changed("source.title", 2**53), "source.title"),
    "an integer far too large": (b'{"options": {"n": ' + b"9" * 5000 + b"}}", "options.n"),
    "a negative one": (changed("source.title", -(2**53)), "source.title"),
    "a float beyond all": (b'{"options": {"n": 1e999}}', "options.n"),
    "a number for a text": (changed("source.id", 5), "source.id"),
    "a text for an object": (changed("source", "x"), "source"),
    "null for an object": (changed("source", None), "source"),
    "an object for a list": (changed("segments", {}), "segments"),
    "an empty list": (changed("segments", []), "segments"),
    "a field more": (changed("userId", "u2"), "userId"),
    "a field more below": (changed("source.extra", 1), "source.extra"),
    "a bool for a text": (changed("lang", True), "lang"),
    "an id too long": (changed("source.id", "x" * 256), "source.id"),
    "an id with a space behind": (changed("source.id", "x "), "source.id"),
    "an id with a control character": (changed("source.id", "a\x07b"), "source.id"),
    "a language that is none": (changed("lang", "xx"), "lang"),
}


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("body", "field"), NAMED.values(), ids=NAMED.keys())
def test_invalid_field_is_named(client: FlaskClient, body: bytes, field: str) -> None:
    answer = client.post(PATH, data=body, content_type="application/json", headers=as_user())
    assert answer.status_code == 422, answer.json
    assert answer.json["error"]["code"] == "INPUT_INVALID"
    named = [each["field"] for each in answer.json["error"]["details"]["fields"]]
    assert any(name == field or name.startswith(field) for name in named), named


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("missing", ["lang", "source", "segments"])
def test_missing_field_is_named(client: FlaskClient, missing: str) -> None:
    body = {name: value for name, value in GOOD.items() if name != missing}
    answer = client.post(PATH, json=body, headers=as_user())
    assert answer.status_code == 422
    assert missing in [each["field"] for each in answer.json["error"]["details"]["fields"]]


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "application/jsonp",
        "application/json; charset=utf-16",
    ],
)
def test_other_content_types_than_json_are_refused(client: FlaskClient, content_type: str) -> None:
    answer = client.post(PATH, data=json.dumps(GOOD), content_type=content_type, headers=as_user())
    assert answer.status_code == 415
    assert answer.json["error"]["code"] == "UNSUPPORTED_MEDIA_TYPE"


@pytest.mark.usefixtures("nothing_is_left")
def test_too_large_body_is_refused_with_and_without_a_content_length(client: FlaskClient, settings: Settings) -> None:
    large = b'{"a": "' + b"x" * settings.body_limit_bytes + b'"}'
    declared = client.post(PATH, data=large, content_type="application/json", headers=as_user())
    assert declared.status_code == 413
    assert declared.json["error"]["code"] == "PAYLOAD_TOO_LARGE"
    undeclared = client.post(
        PATH,
        data=large,
        content_type="application/json",
        headers=as_user(),
        environ_overrides={"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True},
    )
    assert undeclared.status_code == 413


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("key", ["", " ", "k\x01", "k" * 256, "\u00a0k".encode().decode("latin-1"), "k\xff"])
def test_invalid_idempotency_key_is_named(client: FlaskClient, key: str) -> None:
    answer = client.post(PATH, json=GOOD, headers=as_user(), environ_overrides={"HTTP_IDEMPOTENCY_KEY": key})
    assert answer.status_code == 422
    assert answer.json["error"]["details"]["fields"][0]["field"] == "Idempotency-Key"


PARAMETERS = {
    "/api/ai/jobs?limit=0": "limit",
    "/api/ai/jobs?limit=101": "limit",
    "/api/ai/jobs?limit=-1": "limit",
    "/api/ai/jobs?limit=1e2": "limit",
    "/api/ai/jobs?limit=٣": "limit",
    "/api/ai/jobs?limit=": "limit",
    "/api/ai/jobs?limit=" + "9" * 5000: "limit",
    "/api/ai/jobs?limit=1&limit=2": "limit",
    "/api/ai/jobs?cursor=nonsense": "cursor",
    "/api/ai/jobs?cursor=": "cursor",
    "/api/ai/jobs?cursor=%00": "cursor",
    "/api/ai/jobs?cursor=" + "A" * 400: "cursor",
    "/api/ai/jobs?lifecycleStatus=pending": "lifecycleStatus",
    "/api/ai/jobs?jobType=DROP": "jobType",
    "/api/ai/jobs?userId=u2": "userId",
    "/api/ai/jobs?q=x": "q",
    "/api/ai/jobs?%00=1": "\0",
    "/api/ai/jobs/x?y=1": "y",
    "/api/ai/jobs?jobType=": "jobType",
    "/api/ai/jobs?lifecycleStatus=": "lifecycleStatus",
    "/api/learning/flashcards": "jobId",
    "/api/learning/flashcards?jobId=": "jobId",
    "/api/learning/flashcards?jobId=a&jobId=b": "jobId",
}


@pytest.mark.parametrize(("path", "name"), PARAMETERS.items())
def test_invalid_parameter_is_named(client: FlaskClient, path: str, name: str) -> None:
    answer = client.get(path, headers=as_user())
    assert answer.status_code == 422, answer.json
    assert [each["field"] for each in answer.json["error"]["details"]["fields"]] == [name]


ADMIN_PARAMETERS = {
    "createdFrom=yesterday": "createdFrom",
    "createdFrom=0001-01-01T00:00:00%2B14:00": "createdFrom",
    "createdTo=9999-12-31": "createdTo",
    "createdFrom=2026-01-01T08:00:00 08:00": "createdFrom",
    "queueName=ai-maintenance": "queueName",
    "userId=%00": "userId",
    "userId=" + "u" * 256: "userId",
    "errorCode=';--": "errorCode",
    "q=%20x": "q",
    "q=%07": "q",
    "unresolved=1": "unresolved",
    "status=failed&lifecycleStatus=queued": "status",
    "offset=5": "offset",
}


@pytest.mark.parametrize(("query", "name"), ADMIN_PARAMETERS.items())
def test_invalid_filter_is_named(client: FlaskClient, operator: Any, query: str, name: str) -> None:
    answer = client.get(f"/admin-api/ai/jobs?{query}", headers=operator("VIEWER").headers)
    assert answer.status_code == 422, answer.json
    assert [each["field"] for each in answer.json["error"]["details"]["fields"]] == [name]


ADMIN_LISTS = {"/admin-api/ai/jobs": (*JOB_FILTERS, "cursor", "limit"), "/admin-api/ai/usage": (*USAGE_FILTERS,)}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in ADMIN_LISTS.items() for name in names])
def test_empty_filter_of_an_admin_list_is_refused_instead_of_listing_everything(
    client: FlaskClient, operator: Any, path: str, name: str
) -> None:
    answer = client.get(f"{path}?{name}=", headers=operator("SUPER_ADMIN").headers)
    assert answer.status_code == 422, answer.json
    assert [each["field"] for each in answer.json["error"]["details"]["fields"]] == [name]


def test_admin_lists_of_this_test_cover_every_filter() -> None:
    asked = {o.path: set(o.parameters) for o in admin.OPERATIONS if o.method == "GET" and o.parameters}
    assert asked == {path: set(names) for path, names in ADMIN_LISTS.items()}


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b'{"force": true}', "application/json", 422),
        (b"[]", "application/json", 400),
        (b"a=1", "application/x-www-form-urlencoded", 415),
        (b"{}", "text/plain", 415),
        (b"{}", "application/json", 200),
        (b"", "application/x-www-form-urlencoded", 200),
    ],
)
def test_cancel_accepts_only_an_empty_body(
    client: FlaskClient, database: Database, body: bytes, content_type: str, status: int
) -> None:
    job = build_job(**ended("failed"))
    add(database, job)
    path = f"/api/ai/jobs/{job.id}/cancel"
    answer = client.post(path, data=body, content_type=content_type, headers=as_user())
    assert answer.status_code == status


def test_reason_is_stored_without_invisible_characters(client: FlaskClient, database: Database, operator: Any) -> None:
    job = build_job(**ended("succeeded"))
    add(database, job)
    reason, headers = f" \x1b{'x' * 998}\u202e\r\n\x07y ", operator("SUPER_ADMIN").headers
    for act in ("cancel", "reveal"):
        answer = client.post(f"/admin-api/ai/jobs/{job.id}/{act}", json={"reason": reason}, headers=headers)
        assert answer.status_code == 200
    with database.read() as session:
        kept = session.execute(select(AuditLog.reason).where(AuditLog.target_id == job.id)).scalars().all()
    assert kept == ["x" * 998 + "\ny"] * 2


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"reason": ""}', b'{"reason": "  "}', b'{"reason": 1}', b'{"reason": "\\u001b"}']
)
def test_reveal_without_a_reason_is_refused(
    client: FlaskClient, database: Database, operator: Any, body: bytes
) -> None:
    job = build_job(validated_output={"secret": "CANARY"})
    add(database, job)
    headers = operator("SUPER_ADMIN").headers
    path = f"/admin-api/ai/jobs/{job.id}/reveal"
    answer = client.post(path, data=body, content_type="application/json", headers=headers)
    assert answer.status_code in (400, 422)
    assert b"CANARY" not in answer.data
    long = client.post(path, json={"reason": "x" * 1001}, headers=headers)
    assert long.status_code == 422
