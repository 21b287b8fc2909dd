"""A database outage while workers have a full queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import func, select

from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput
from aijobs.outbox.models import OutboxEvent
from aijobs.settings import Settings
from aijobs.wiring.services import Services, build_services
from tests.support.databases import PostgresServer
from tests.support.polling import poll
from tests.support.processes import Processes, Run
from tests.support.rows import prepare_database

JOBS = 60


@pytest.fixture
def env(postgres: PostgresServer, redis_url: str, run: Run) -> Iterator[dict[str, str]]:
    """Return settings for processes over a PostgreSQL that the test may stop."""
    postgres.ensure_running()
    url = postgres.create_database(prepare_database)
    yield {
        "AIJOBS_INSTANCE_PATH": str(run.new_folder("away")),
        "AIJOBS_DATABASE_URL": url,
        "AIJOBS_REDIS_URL": redis_url,
        "AIJOBS_MESSAGE_KEYS": f"k1:{'m' * 32}",
    }
    postgres.ensure_running()
    postgres.drop_database(url)


@pytest.fixture
def services(env: dict[str, str]) -> Iterator[Services]:
    services = build_services(Settings.load(env))
    yield services
    services.database.dispose()
    services.broker.client.close()


@pytest.mark.postgres
@pytest.mark.long
def test_workers_take_no_messages_while_the_database_is_away(
    postgres: PostgresServer, env: dict[str, str], services: Services, processes: Processes
) -> None:
    for n in range(JOBS):
        services.jobs.create_job(CreateJobInput(f"u{n}", "synthetic", "note", "n1", {"calls": [{"sleep_ms": 5}]}))
    services.database.dispose()
    huey_consumer = Path(sys.executable).with_name("huey_consumer")
    postgres.stop()
    worker = processes.spawn([huey_consumer, "aijobs.workers.interactive", "-w", "2"], env=env, name="refused")
    assert worker.wait(30) == 1, "a worker that starts without a database is refused"
    postgres.start()
    worker = processes.spawn([huey_consumer, "aijobs.workers.interactive", "-w", "2"], env=env, name="interactive")
    poll(lambda: services.broker.pending_count("ai-interactive") < JOBS, timeout=30, what="the worker is at work")
    postgres.stop()
    worker.wait_for_output("engine.database.away", timeout=30)
    waiting = services.broker.pending_count("ai-interactive")
    depths, ends = [], time.monotonic() + 2
    while time.monotonic() < ends:
        depths.append(services.broker.pending_count("ai-interactive"))
        time.sleep(0.05)

    # Each thread has taken one message at most.
    assert waiting > 2, "the queue was empty before the database went away"
    assert min(depths) >= waiting - 2

    postgres.start()
    with services.database.read() as session:
        total = select(func.count()).select_from(AiJob)
        done = total.where(AiJob.lifecycle_status == "succeeded")
        # Jobs that ran when the database stopped wait for the reaper, which doesn't run here.
        poll(lambda: session.execute(done).scalar_one() >= JOBS - 2 or session.rollback(), timeout=60, what="all done")
        assert session.execute(select(func.sum(OutboxEvent.redrives))).scalar_one() <= 2
