"""Console, API and readiness while the broker refuses writes, is frozen, or holds invalid values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import FileSystemBytecodeCache

from aijobs.queues.broker import queue_key
from aijobs.queues.presence import HEARTBEAT_PREFIX, Presence
from aijobs.web.factory import create_app
from aijobs.wiring.services import build_services
from tests.support.databases import SqliteDatabases
from tests.support.ports import free_port
from tests.support.scratch import open_database, scratch_database
from tests.support.servers import ValkeyServer
from tests.web.console.stage import Stage, add_operators, build_settings

PAGES = ("/console/queues", "/console/workers", "/console/providers", "/console/jobs")
OpenStage = Callable[[str], Stage]


@pytest.fixture
def open_stage(
    sqlite: SqliteDatabases, tmp_path: Path, compiled_templates: FileSystemBytecodeCache
) -> Iterator[OpenStage]:
    """`open_stage(redis_url)` opens the console over the given broker."""
    url = scratch_database(sqlite, add_operators)
    with open_database(url) as database:

        def start(redis_url: str) -> Stage:
            settings = build_settings(url, redis_url, tmp_path)
            app = create_app(services=(services := build_services(settings, database=database)))
            app.testing = True
            app.jinja_env.bytecode_cache = compiled_templates
            return Stage(services, app)

        yield start


def texts(stage: Stage, *paths: str) -> dict[str, str]:
    """Return each page's text for a signed-in operator; each must answer with 200."""
    client = stage.client("SUPER_ADMIN")
    shown = {}
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 200, path
        shown[path] = answer.get_data(as_text=True)
    return shown


def ready(stage: Stage) -> dict[str, Any]:
    answer = stage.app.test_client().get("/readyz")
    assert answer.status_code == 200
    return dict(answer.get_json())


def test_read_only_broker_is_named_instead_of_a_missing_worker(
    open_stage: OpenStage, start_valkey: Callable[..., ValkeyServer]
) -> None:
    server = start_valkey()
    stage = open_stage(server.url)
    job_id = stage.create()
    stage.deliver(job_id)
    with server.client() as admin:
        admin.replicaof("127.0.0.1", str(free_port()))
        assert (ready(stage)["broker"], ready(stage)["brokerCause"]) == ("takes_no_writes", "It is a read-only replica")
        shown = texts(stage, "/console/queues", "/console/workers", f"/console/jobs/{job_id}")
        for page in shown.values():
            assert "The broker takes no writes" in page
            assert "It is a read-only replica" in page
        assert "no live worker serves this queue" not in "".join(shown.values()).lower()
        admin.replicaof("NO", "ONE")
    assert (ready(stage)["broker"], ready(stage).get("brokerCause")) == ("ok", None)


def test_refused_queue_is_named_and_the_other_is_ok(stage: Stage, valkey: ValkeyServer) -> None:
    with valkey.client() as admin:
        admin.set(queue_key("ai-background"), "somebody else's")
    cause = "One of our keys holds a value of another type (WRONGTYPE)"
    assert ready(stage)["brokerCause"] == f"ai-background: {cause}"
    page = texts(stage, "/console/queues")["/console/queues"]
    assert page.count("The broker takes no writes.") == 1
    states = {queue.queue_name: (queue.broker, queue.broker_cause) for queue in stage.services.monitor.queue_statuses()}
    assert states == {"ai-interactive": ("ok", None), "ai-background": ("takes_no_writes", cause)}


def test_frozen_broker_delays_pages_only_once(stage: Stage, valkey: ValkeyServer) -> None:
    stage.create()
    valkey.freeze()
    try:
        for _ in range(20):  # If each one waited for the broker, the test's time limit would be exceeded.
            shown = texts(stage, *PAGES)
    finally:
        valkey.thaw()
    assert "The broker cannot be reached." in shown["/console/queues"]
    assert "The broker cannot be reached." in shown["/console/workers"]


def test_invalid_values_in_redis_break_no_page_and_no_new_job(stage: Stage, valkey: ValkeyServer) -> None:
    junk = [b'{"opened":1,"until":1e999}', b'{"opened":1,"until":1' + b"0" * 30 + b"}", b"null", b"[" * 100_000]
    card = b'{"instanceId":"i","queue":"q","host":"h","pid":%s,"startedAt":"%s","activeJobCount":0,"activeJobIds":[]}'
    with valkey.client() as admin:
        for value in junk:
            for provider in ("deepseek", "local"):
                admin.set(f"aijobs:breaker:{provider}.platform", value)
                admin.set(f"aijobs:calls:{provider}:0", value)
            for name, heartbeat in (
                ("a", card % (b"1e999", b"2026-03-01T08:00:00Z")),
                ("b", card % (b"1", b"0001-01-01T00:00:00+12:00")),
                ("c", value),
            ):
                admin.set(f"{HEARTBEAT_PREFIX}{name}", heartbeat, ex=60)
            job_id = stage.create()
            texts(stage, *PAGES, f"/console/jobs/{job_id}")
    assert ready(stage)["broker"] == "ok"


def test_worker_that_takes_no_waiting_message_is_stalled(stage: Stage) -> None:
    stage.create()
    now = [1000.0]
    presence = Presence(stage.services.broker.client, stage.instance, "ai-interactive", monotonic=lambda: now[0])
    presence.asked(popped=True)
    presence.beat()
    (worker,) = stage.services.monitor.workers().workers
    assert worker.state == "live"
    now[0] += 60
    presence.beat()
    (worker,) = stage.services.monitor.workers().workers
    assert worker.state == "stalled"
    assert worker.popped_s == pytest.approx(60, abs=10)
    assert "Not taking messages" in texts(stage, "/console/workers")["/console/workers"]
