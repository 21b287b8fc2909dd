"""Marked content in a whole journey is found only in its own places."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jwt
import pytest
import redis
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import inspect, text

from aijobs.clock import utc_now
from aijobs.db.database import Database
from aijobs.ids import InstanceId
from aijobs.jobs.requests import CreateJobInput
from aijobs.logs import configure
from aijobs.queues.broker import RedisBroker, queue_key
from aijobs.queues.codec import PREFIX_BYTES, decode
from aijobs.queues.presence import Presence
from aijobs.settings import KeyRing, Settings
from aijobs.web.factory import create_app
from aijobs.wiring.engine import build_engine
from aijobs.wiring.passes import build_maintenance_crew
from aijobs.wiring.services import Services, build_services
from tests.integration.canaries.canaries import read_redis
from tests.support.databases import SqliteDatabases
from tests.support.polling import poll
from tests.support.processes import Run
from tests.support.rows import prepare_database
from tests.support.servers import ValkeyServer

CONTENT = "CANARYCONTENT"
USER = "CANARYUSER"
KEY = "CANARYKEY"
SECRET = "CANARYSECRET"
MARKS = (CONTENT, USER, KEY, SECRET)

NOTES = {
    "lang": "en",
    "source": {"id": f"note-{CONTENT}", "title": f"About {CONTENT}"},
    "segments": [
        {
            "sid": "p1",
            "text": f"{CONTENT} osmosis is the movement of water across a membrane. "
            f"A {CONTENT} solute is a substance that is dissolved in a liquid.",
        }
    ],
}

COLUMNS = {
    CONTENT: {
        "ai_job_snapshots.content",
        "ai_jobs.validated_output",
        "ai_jobs.target_id",
        "ai_jobs.internal_error_message",
        "flashcards.front",
        "flashcards.back",
        "flashcards.text",
        "flashcards.hint",
        "flashcards.tags",
        "flashcards.evidence",
        "flashcards.source_id",
        "flashcards.source_title",
    },
    USER: {
        "ai_jobs.user_id",
        "ai_jobs.cancel_requested_by",
        "ai_job_events.actor",
        "ai_usage_logs.user_id",
        "flashcards.user_id",
        "outbox_events.dedupe_key",
        "quota_usage.user_id",
        "user_model_credentials.user_id",
    },
    KEY: {"ai_jobs.idempotency_key", "outbox_events.dedupe_key"},
    SECRET: {"ai_jobs.internal_error_message"},
}
"""The columns that may contain each mark. `target_id` is the note's id, which the app chooses. An internal message may
quote an exception (here one with both marks in its text); only a SUPER_ADMIN sees it."""


@dataclass
class Journey:
    """A web application, a broker with a password, an engine in this process, and everything that they write."""

    services: Services
    app: Flask
    redis: redis.Redis
    log: io.StringIO
    answers: list[str] = field(default_factory=list)
    seen_in_redis: list[str] = field(default_factory=list)
    jobs: dict[str, str] = field(default_factory=dict)

    @property
    def client(self) -> FlaskClient:
        return self.app.test_client()

    def ask(self, method: str, path: str, user: str = USER, **options: Any) -> Any:
        claims = {"sub": user, "exp": utc_now().timestamp() + 600}
        token = jwt.encode(claims, self.services.settings.jwt_secret, "HS256")
        headers = {"Authorization": f"Bearer {token}", **options.pop("headers", {})}
        return self.client.open(path, method=method, headers=headers, **options)

    def dump_redis(self) -> str:
        """Return every key with its value as text, and record it in `seen_in_redis`."""
        lines = read_redis(self.redis)
        self.seen_in_redis += lines
        return "\n".join(lines)

    def run_next(self, queue_name: str) -> str:
        """Pop a queue's next message and run it, as a consumer does."""
        popped = self.redis.zpopmin(queue_key(queue_name))
        assert popped, f"nothing waits in {queue_name}"
        envelope = decode(popped[0][0][PREFIX_BYTES:], self.services.settings.message_keys, queue_name)
        instance = InstanceId.current()
        presence = Presence(self.services.broker.client, instance, queue_name, beat_s=0.05)
        engine = build_engine(self.services, presence, instance, lambda: None)
        presence.start()
        engine.start()
        try:
            return engine.execute(envelope.message)
        finally:
            self.dump_redis()
            engine.drain(0)
            engine.close()
            presence.leave()


@contextlib.contextmanager
def open_journey(sqlite: SqliteDatabases, run: Run) -> Iterator[Journey]:
    """Open a journey without jobs."""
    server = ValkeyServer(run, [f"requirepass {SECRET}redis"])
    server.start()
    url = server.url_for("default", f"{SECRET}redis")
    settings = Settings(
        instance_path=run.new_folder("canary"),
        database_url=sqlite.create_database(prepare_database),
        redis_url=url,
        secret_key=f"{SECRET}session" + "s" * 32,
        jwt_secret=f"{SECRET}jwt" + "j" * 32,
        message_keys=KeyRing((("k1", f"{SECRET}message".encode() + b"m" * 32),)),
        credential_keys=KeyRing((("c1", f"{SECRET}credential".encode() + b"c" * 32),)),
    )
    try:
        with _captured("DEBUG") as log:
            services = build_services(settings)
            client = redis.Redis.from_url(url)
            yield Journey(services, create_app(services=services), client, log)
            client.close()
            services.broker.client.close()
            services.database.dispose()
    finally:
        server.kill()
        sqlite.drop_database(settings.database_url)


@pytest.fixture
def journey(sqlite: SqliteDatabases, run: Run) -> Iterator[Journey]:
    """Open a journey without jobs."""
    with open_journey(sqlite, run) as opened:
        yield opened


@pytest.fixture(scope="module")
def travelled(sqlite: SqliteDatabases, run: Run) -> Iterator[Journey]:
    """Run a whole journey once, for all tests that only search its traces."""
    with open_journey(sqlite, run) as opened:
        opened.jobs = _whole_journey(opened)
        yield opened


@contextlib.contextmanager
def _captured(level: str) -> Iterator[io.StringIO]:
    """Capture the whole log, including libraries, of every thread."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, before = list(root.handlers), root.level
    configure(level, stream=stream)
    try:
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(before)


def _flashcards(journey: Journey, key: str = KEY) -> str:
    answer = journey.ask("POST", "/api/learning/flashcards", json=NOTES, headers={"Idempotency-Key": key})
    assert answer.status_code == 202, answer.json
    return str(answer.json["jobId"])


def _script(journey: Journey, *calls: dict[str, Any], key: str) -> str:
    created = journey.services.jobs.create_job(
        CreateJobInput(
            user_id=USER,
            job_type="synthetic",
            target_type="script",
            target_id=f"{CONTENT}-{key}",
            input={"calls": list(calls)},
            idempotency_key=f"{KEY}-{key}",
        )
    )
    return str(created.job.id)


def _whole_journey(journey: Journey) -> dict[str, str]:
    """Run a job to each end: succeeded, failed and retried, cancelled while waiting, cancelled while running."""
    stored = journey.ask("POST", "/api/ai/credentials", json={"key": f"sk-{SECRET}-of-the-user", "label": "Mine"})
    assert stored.status_code == 201
    jobs = {"succeeded": _flashcards(journey)}
    journey.dump_redis()
    assert journey.run_next("ai-background") == "succeeded"

    jobs["failed"] = _script(journey, {"raise": "CONTENT_SAFETY_BLOCKED", "output": {"x": CONTENT}}, key="failed")
    assert journey.run_next("ai-interactive") == "failed"
    jobs["retry"] = journey.services.jobs.retry(jobs["failed"], by="operator:ada").job.id
    assert journey.run_next("ai-interactive") == "failed"

    jobs["waiting"] = _flashcards(journey, f"{KEY}-waiting")
    assert journey.ask("POST", f"/api/ai/jobs/{jobs['waiting']}/cancel").json["phase"] == "cancelled"

    jobs["running"] = _script(journey, {"sleep_ms": 60_000, "output": {"x": CONTENT}}, key="running")
    outcome: list[str] = []
    worker = threading.Thread(target=lambda: outcome.append(journey.run_next("ai-interactive")))
    worker.start()
    # The id alone isn't enough, because the message contains it too until it is popped.
    poll(lambda: f'"activeJobIds": ["{jobs["running"]}"]' in journey.dump_redis(), what="the heartbeat names the job")
    assert journey.ask("POST", f"/api/ai/jobs/{jobs['running']}/cancel").json["phase"] in (
        "cancel_requested",
        "cancelled",
    )
    # Repeat the hint, because the first one may have timed out after 0.2 s.
    journey.services.broker.hint_cancel(jobs["running"])
    poll(lambda: "job:cancel:" in journey.dump_redis(), what="the hint is there")
    worker.join(timeout=20)
    assert outcome == ["cancelled"]
    _exploding(journey)
    for one in build_maintenance_crew(journey.services).passes:
        one.run()
    journey.dump_redis()
    return jobs


def _exploding(journey: Journey) -> None:
    """Run a job whose script quotes its input in an exception."""
    registry = journey.services.registry
    definition = registry.get("synthetic")

    def explode(job_input: Any, attempt_no: int, context: Any) -> dict[str, Any]:
        raise ValueError(f"can't read {job_input} with {SECRET}")

    registry._definitions["synthetic"] = replace(
        definition, script=explode, execution=replace(definition.execution, max_retries=0)
    )
    try:
        _script(journey, {"output": {"x": CONTENT}}, key="exploding")
        assert journey.run_next("ai-interactive") == "failed"
    finally:
        registry._definitions["synthetic"] = definition


def test_debug_log_contains_no_content_user_key_or_secret(travelled: Journey) -> None:
    lines = travelled.log.getvalue().splitlines()
    events = {json.loads(line)["event"] for line in lines}
    assert {"job.created", "job.locked", "job.succeeded", "job.failed", "job.cancelled"} <= events
    assert not [line for line in lines if any(mark in line for mark in MARKS)]


def test_broker_contains_no_content_user_key_or_secret(travelled: Journey) -> None:
    seen = travelled.seen_in_redis
    assert any("huey.redis.aijobs_" in line for line in seen)
    assert any("worker:heartbeat:" in line for line in seen)
    assert any("job:cancel:" in line for line in seen)
    assert not [line for line in seen if any(mark in line for mark in MARKS)]


def test_database_contains_each_mark_only_in_its_columns(travelled: Journey) -> None:
    for mark, allowed in COLUMNS.items():
        found = _columns_with(travelled.services.database, mark)
        assert found <= allowed, f"{mark}: {sorted(found - allowed)}"
        assert found, f"{mark}: the journey left none at all"


def _columns_with(database: Database, mark: str) -> set[str]:
    found = set()
    with database.engine.connect() as connection:
        for table in inspect(connection).get_table_names():
            for row in connection.execute(text(f"SELECT * FROM {table}")).mappings():
                found |= {f"{table}.{column}" for column, value in row.items() if mark in str(value)}
    return found


def test_outbox_payload_and_message_have_four_fields_each(journey: Journey) -> None:
    _flashcards(journey)
    with journey.services.database.engine.connect() as connection:
        (payload,) = connection.execute(text("SELECT payload FROM outbox_events")).scalars()
    assert set(json.loads(payload)) == {"jobId", "jobType", "queueName", "priority"}
    ((member, _),) = journey.redis.zrange(queue_key("ai-background"), 0, -1, withscores=True)
    body = json.loads(member[PREFIX_BYTES:])
    assert set(body["args"][0]) == {"jobId", "jobType", "idempotencyKey", "createdAt"}


def test_job_is_invisible_to_another_user(travelled: Journey) -> None:
    for job_id in travelled.jobs.values():
        for method, path in (
            ("GET", f"/api/ai/jobs/{job_id}"),
            ("POST", f"/api/ai/jobs/{job_id}/cancel"),
            ("GET", f"/api/learning/flashcards?jobId={job_id}"),
        ):
            answer = travelled.ask(method, path, user="somebody else")
            assert answer.status_code == 404
            assert not _marked(answer)
    assert travelled.ask("GET", "/api/ai/jobs", user="somebody else").json == {"jobs": []}


def test_job_shows_its_user_no_content_key_or_secret(travelled: Journey) -> None:
    for job_id in travelled.jobs.values():
        answer = travelled.ask("GET", f"/api/ai/jobs/{job_id}")
        assert answer.status_code == 200
        assert not _marked(answer)
    cards = travelled.ask("GET", f"/api/learning/flashcards?jobId={travelled.jobs['succeeded']}")
    assert CONTENT in cards.get_data(as_text=True), "the cards are the user's own content"


def test_error_repeats_only_field_names_of_the_request(journey: Journey) -> None:
    _flashcards(journey)
    refused = [
        journey.ask("POST", "/api/learning/flashcards", json={**NOTES, "lang": CONTENT}),
        journey.ask("POST", "/api/learning/flashcards", json={**NOTES, "segments": [{"sid": CONTENT, "text": " "}]}),
        journey.ask("POST", "/api/learning/flashcards", json={**NOTES, "lang": "zh"}, headers={"Idempotency-Key": KEY}),
        journey.ask("POST", "/api/learning/flashcards", json=NOTES, headers={"Idempotency-Key": f" {KEY}"}),
        journey.ask("POST", "/api/learning/flashcards", data=f'{{"lang": {CONTENT}', content_type="application/json"),
        journey.ask("GET", f"/api/learning/flashcards?jobId={CONTENT}"),
        journey.client.get("/api/ai/jobs", headers={"Authorization": f"Bearer {SECRET}"}),
    ]
    assert [answer.status_code for answer in refused] == [422, 422, 409, 422, 400, 404, 401]
    assert not [answer.get_data(as_text=True) for answer in refused if _marked(answer)]


def test_broker_outage_is_logged_without_the_password(journey: Journey) -> None:
    url = f"redis://default:{SECRET}redis@127.0.0.1:1/0"
    broker = RedisBroker.from_settings(replace(journey.services.settings, redis_url=url))
    services = build_services(journey.services.settings, database=journey.services.database, broker=broker)
    created = services.jobs.create_job(
        CreateJobInput(USER, "synthetic", "script", f"{CONTENT}-away", {"calls": [{"output": {"x": CONTENT}}]})
    )
    assert created.created
    broker.client.close()
    log = journey.log.getvalue()
    assert "handover.broker.away" in log
    assert not [mark for mark in MARKS if mark in log]


def _marked(answer: Any) -> bool:
    content = answer.get_data(as_text=True) + str(answer.headers)
    return any(mark in content for mark in MARKS)
