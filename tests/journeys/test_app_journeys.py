"""Journeys of learners and operators over HTTP, with every process as deployed and a broker user that has only the
documented permissions.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete

from aijobs.cli.tokens import issue_user_token
from aijobs.ids import new_id
from aijobs.jobs.lease import JobErrorInfo
from aijobs.jobs.requests import CreateJobInput
from aijobs.outbox.models import QueuePause
from aijobs.queues.connection import ACL_RULES
from aijobs.settings import Settings
from aijobs.wiring.services import Services, build_services
from tests.support.polling import poll
from tests.support.ports import free_port
from tests.support.processes import Processes, Run
from tests.support.servers import ValkeyServer

AIJOBS = str(Path(sys.executable).with_name("aijobs"))
NOTES = {
    "lang": "en",
    "source": {"id": "note-1", "title": "Osmosis"},
    "segments": [
        {"sid": "p1", "text": "Osmosis is the movement of water across a partially permeable membrane."},
        {"sid": "p2", "text": "A solute is a substance that is dissolved in a liquid."},
    ],
}


@dataclass(frozen=True)
class Answer:
    """An HTTP answer; headers by lower-case name."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


@dataclass
class App:
    """A running aijobs, as the learning app and an operator use it."""

    url: str
    services: Services
    broker: ValkeyServer
    operator_token: str

    def ask(
        self,
        method: str,
        path: str,
        user: str = "ana",
        body: Any = None,
        key: str | None = None,
        token: str | None = None,
    ) -> Answer:
        token = token or issue_user_token(self.services.settings, user, hours=1)
        headers = {"Authorization": f"Bearer {token}"}
        data = None
        if body is not None:
            headers["Content-Type"], data = "application/json", json.dumps(body).encode()
        if key is not None:
            headers["Idempotency-Key"] = key
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as found:
                return Answer(found.status, {k.lower(): v for k, v in found.headers.items()}, found.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())

    def operate(self, method: str, path: str, body: Any = None) -> Answer:
        return self.ask(method, path, body=body, token=self.operator_token)

    def order(self, key: str | None = None) -> str:
        answer = self.ask("POST", "/api/learning/flashcards", body=NOTES, key=key)
        assert answer.status == 202, answer.raw
        return str(answer.body["jobId"])

    def end_of(self, job_id: str, user: str = "ana") -> dict[str, Any]:
        """Wait until the job is final and return it."""

        def final() -> dict[str, Any] | None:
            job: dict[str, Any] = self.ask("GET", f"/api/ai/jobs/{job_id}", user).body
            return job if job["lifecycleStatus"] in ("succeeded", "failed", "cancelled") else None

        return poll(final, timeout=30, what=f"job {job_id} ended")

    @contextmanager
    def paused(self, queue_name: str) -> Iterator[None]:
        """Pause the queue during the block."""
        database, clock = self.services.database, self.services.clock
        with database.transaction() as session:
            session.add(QueuePause(queue_name=queue_name, reason="test", paused_by="test", paused_at=clock.now()))
        try:
            yield
        finally:
            with database.transaction() as session:
                session.execute(delete(QueuePause))


@pytest.fixture(scope="module")
def app(run: Run) -> Iterator[App]:
    broker = ValkeyServer(run, [f"user aijobs on >secret {ACL_RULES}"])
    broker.start()
    processes = Processes(run)
    try:
        env = {
            "AIJOBS_INSTANCE_PATH": str(run.new_folder("app")),
            "AIJOBS_PORT": str(free_port()),
            "AIJOBS_REDIS_URL": broker.url_for("aijobs", "secret"),
        }
        up = processes.spawn([AIJOBS, "up"], env=env, name="up")
        up.wait_for_output("Ctrl-C stops everything.", timeout=60)
        issued = processes.spawn([AIJOBS, "operator-token", "admin"], env=env, name="operator-token")
        assert issued.wait(30) == 0
        token = next(word for word in issued.output.split() if word.startswith("ajo_"))
        services = build_services(Settings.load(env))
        yield App(f"http://127.0.0.1:{env['AIJOBS_PORT']}", services, broker, token)
        services.database.dispose()
    finally:
        processes.stop_all()
        broker.stop()


def test_notes_become_cards_with_quotes(app: App) -> None:
    created = app.ask("POST", "/api/learning/flashcards", body=NOTES, key="first")
    assert created.status == 202
    assert created.body["lifecycleStatus"] == "queued"
    assert created.headers["location"] == f"/api/ai/jobs/{created.body['jobId']}"

    job = app.end_of(created.body["jobId"])
    assert job["lifecycleStatus"] == "succeeded"
    assert job["progress"] == 100
    assert job["createdAt"] <= job["queuedAt"] <= job["startedAt"] <= job["finishedAt"]
    found = app.ask("GET", f"/api/learning/flashcards?jobId={job['jobId']}").body
    assert [card["flashcardId"] for card in found["flashcards"]] == [
        a["artifactId"] for a in job["result"]["artifacts"]
    ]
    texts = {segment["sid"]: segment["text"] for segment in NOTES["segments"]}
    assert found["flashcards"]
    assert found["madeBy"] == "rules", "the learning app can say that no AI model made the cards"
    assert all(e["quote"] in texts[e["sid"]] for card in found["flashcards"] for e in card["evidence"])


def test_broker_user_needs_only_the_documented_permissions(app: App) -> None:
    app.end_of(app.order())
    with app.broker.client() as client:
        assert client.acl_log() == []


def test_repeated_and_concurrent_requests_with_one_key_create_one_job(app: App) -> None:
    first = app.ask("POST", "/api/learning/flashcards", body=NOTES, key="again")
    second = app.ask("POST", "/api/learning/flashcards", body=NOTES, key="again")
    assert (first.status, second.status) == (202, 200)
    assert first.body["jobId"] == second.body["jobId"]

    with ThreadPoolExecutor(20) as pool:
        answers = list(
            pool.map(lambda _: app.ask("POST", "/api/learning/flashcards", body=NOTES, key="at-once"), range(20))
        )
    assert sorted(answer.status for answer in answers) == [200] * 19 + [202]
    assert len({answer.body["jobId"] for answer in answers}) == 1

    other = app.ask("POST", "/api/learning/flashcards", body={**NOTES, "lang": "zh"}, key="again")
    assert (other.status, other.body["error"]["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")


def test_waiting_job_is_cancelled_at_once(app: App) -> None:
    with app.paused("ai-background"):
        job_id = app.order()
        cancelled = app.ask("POST", f"/api/ai/jobs/{job_id}/cancel")
    assert (cancelled.status, cancelled.body["lifecycleStatus"]) == (200, "cancelled")
    assert "cancelRequestedAt" in cancelled.body
    history = app.operate("GET", f"/admin-api/ai/jobs/{job_id}").body["history"]
    assert [entry["type"] for entry in history] == ["created", "cancel_requested", "cancelled"]


def test_running_job_is_cancelled_by_its_worker(app: App) -> None:
    slow = {"calls": [{"sleep_ms": 60_000}]}
    job = app.services.jobs.create_job(CreateJobInput("ana", "synthetic", "test", "slow", slow)).job
    poll(lambda: app.ask("GET", f"/api/ai/jobs/{job.id}").body["phase"] == "running", what="the job runs")

    asked = app.ask("POST", f"/api/ai/jobs/{job.id}/cancel")
    assert asked.status == 200
    assert asked.body["phase"] in ("cancel_requested", "cancelled")
    assert app.end_of(job.id)["lifecycleStatus"] == "cancelled"
    last = app.operate("GET", f"/admin-api/ai/jobs/{job.id}").body["history"][-1]
    assert (last["type"], last["actor"]) == ("cancelled", "worker")


def test_cancel_of_an_ended_job_changes_nothing(app: App) -> None:
    job_id = app.order()
    before = app.end_of(job_id)
    for _ in range(2):
        again = app.ask("POST", f"/api/ai/jobs/{job_id}/cancel")
        assert (again.status, again.body) == (200, before)
    strict = app.ask("POST", f"/api/ai/jobs/{job_id}/cancel?strict=true")
    assert (strict.status, strict.body["error"]["code"]) == (409, "JOB_NOT_CANCELLABLE")


def test_failed_job_is_recovered_by_its_retry(app: App) -> None:
    with app.paused("ai-background"):
        job_id = app.order()
        app.services.lifecycle.give_up(job_id, 1, JobErrorInfo.of("INTERNAL_NOT_DISPATCHED"))
    failed = app.end_of(job_id)
    assert (failed["lifecycleStatus"], failed["errorCode"]) == ("failed", "INTERNAL_NOT_DISPATCHED")

    retried = app.operate("POST", f"/admin-api/ai/jobs/{job_id}/retry")
    assert retried.status == 201, retried.raw
    child_id = retried.body["jobId"]
    assert app.end_of(child_id)["lifecycleStatus"] == "succeeded"
    assert app.ask("GET", f"/api/ai/jobs/{job_id}").body["retriedAs"] == child_id
    followed = app.ask("GET", f"/api/learning/flashcards?jobId={job_id}").body
    assert followed["job"]["jobId"] == child_id
    assert followed["flashcards"]
    chain = app.operate("GET", f"/admin-api/ai/jobs/{job_id}").body["chain"]
    assert [link["jobId"] for link in chain] == [job_id, child_id]
    refused = app.operate("POST", f"/admin-api/ai/jobs/{job_id}/retry")
    assert (refused.status, refused.body["error"]["details"]["newestJobId"]) == (409, child_id)


@pytest.mark.parametrize(("method", "suffix"), [("GET", ""), ("POST", "/cancel"), ("POST", "/cancel?strict=true")])
def test_another_users_job_answers_like_an_unknown_job(app: App, method: str, suffix: str) -> None:
    job_id = app.order()
    strangers = app.ask(method, f"/api/ai/jobs/{job_id}{suffix}", user="bob")
    nobodys = app.ask(method, f"/api/ai/jobs/{new_id()}{suffix}", user="bob")
    assert strangers.status == nobodys.status == 404
    assert strangers.raw == nobodys.raw
    without_date = [{k: v for k, v in a.headers.items() if k != "date"} for a in (strangers, nobodys)]
    assert without_date[0] == without_date[1]
