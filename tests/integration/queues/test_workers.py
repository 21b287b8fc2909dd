"""The three queues as deployed: `huey_consumer aijobs.workers.…` over a real database and broker."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from aijobs.cli.tokens import issue_user_token
from aijobs.definitions.definition import BACKGROUND, INTERACTIVE
from aijobs.errors import describe
from aijobs.job_types.flashcard_generation import SAMPLE_INPUT
from aijobs.jobs.models import AiJob, AiJobEvent
from aijobs.jobs.requests import CreateJobInput
from aijobs.outbox.models import OutboxEvent, OutboxEventType, OutboxState
from aijobs.queues.connection import ACL_RULES
from aijobs.queues.presence import HEARTBEAT_PREFIX
from aijobs.settings import Settings
from aijobs.testing.fakellm import FakeLlm, faults
from aijobs.web.factory import create_app
from aijobs.wiring.services import Services, build_services
from bench.providers import PROVIDERS
from bench.reliability import SHORT_LEASES
from tests.support.messages import SECRET
from tests.support.polling import poll
from tests.support.ports import free_port
from tests.support.processes import Processes, Program, Run
from tests.support.rows import prepare_database
from tests.support.servers import ValkeyServer
from tests.web.console.stage import Console, add_operators

HUEY_CONSUMER = Path(sys.executable).with_name("huey_consumer")
USER = "user"
BUSY_S = 10
"""Extra time for a busy machine, beyond the configured periods."""


class Site:
    """A database, a broker's address, and their consumers."""

    def __init__(
        self, processes: Processes, folder: Path, database_url: str, redis_url: str, settings: Mapping[str, str]
    ) -> None:
        self._processes = processes
        self._folder = folder
        self.env = {
            "AIJOBS_INSTANCE_PATH": str(folder),
            "AIJOBS_DATABASE_URL": database_url,
            "AIJOBS_REDIS_URL": redis_url,
            "AIJOBS_MESSAGE_KEYS": f"k1:{SECRET}",
            **settings,
        }
        self.services: Services = build_services(Settings.load(self.env))

    def start(self, queue: str, *options: str, **env: str) -> Program:
        """Start a consumer and wait until it works."""
        consumer = self.spawn(queue, *options, **env)
        consumer.wait_for_output("Huey consumer started", timeout=30)
        return consumer

    def spawn(self, queue: str, *options: str, **env: str) -> Program:
        # From another folder than the project: nothing may depend on the working directory.
        return self._processes.spawn(
            [HUEY_CONSUMER, f"aijobs.workers.{queue}", *options],
            env={**self.env, **env},
            cwd=self._folder,
            name=queue,
        )

    def create(self, *calls: dict[str, Any]) -> str:
        """Create a synthetic job, whose message is handed over if the broker is reachable."""
        return self.order("synthetic", {"calls": list(calls) or [{"artifacts": 2}]})

    def order(self, job_type: str, job_input: dict[str, Any]) -> str:
        """Create a job of any type."""
        made = self.services.jobs.create_job(CreateJobInput(USER, job_type, "Note", "note-1", job_input))
        return made.job.id

    def job(self, job_id: str) -> AiJob:
        with self.services.database.read() as session:
            job = session.get(AiJob, job_id)
            assert job is not None
            return job

    def event_of(self, job_id: str) -> OutboxEvent:
        with self.services.database.read() as session:
            query = select(OutboxEvent).where(
                OutboxEvent.aggregate_id == job_id, OutboxEvent.event_type == OutboxEventType.ENQUEUE
            )
            return session.execute(query).scalar_one()

    def history(self, job_id: str) -> list[str]:
        with self.services.database.read() as session:
            rows = session.execute(select(AiJobEvent.type).where(AiJobEvent.job_id == job_id).order_by(AiJobEvent.seq))
            return list(rows.scalars())

    def wait_for(self, job_id: str, status: str, timeout: float = 30) -> AiJob:
        poll(
            lambda: self.job(job_id).lifecycle_status == status,
            timeout=timeout,
            what=f"the job is {status}; its history: {self.history(job_id)}",
        )
        return self.job(job_id)

    def active_jobs(self) -> list[str]:
        return [job_id for worker in self.services.presence.read() for job_id in worker.active_job_ids]


SiteBuilder = Callable[..., Site]


def _build_sites(processes: Processes, run: Run, create_database: Callable[..., str]) -> Iterator[SiteBuilder]:
    sites: list[Site] = []

    def build(redis_url: str, **settings: str) -> Site:
        url = create_database(prepare_database)
        sites.append(Site(processes, run.new_folder("site"), url, redis_url, settings))
        return sites[-1]

    yield build
    for site in sites:
        site.services.database.dispose()
        site.services.broker.client.close()


@pytest.fixture
def build_site(processes: Processes, run: Run, create_sqlite_database: Callable[..., str]) -> Iterator[SiteBuilder]:
    """`build_site(redis_url, **settings)` returns a site over a fresh database."""
    yield from _build_sites(processes, run, create_sqlite_database)


@pytest.fixture
def build_site_on_each(processes: Processes, run: Run, create_database: Callable[..., str]) -> Iterator[SiteBuilder]:
    """Like `build_site`, over each kind of database in turn."""
    yield from _build_sites(processes, run, create_database)


@pytest.fixture
def site(build_site: SiteBuilder, redis_url: str) -> Site:
    return build_site(redis_url)


def test_import_of_the_workers_needs_no_settings_database_or_broker(processes: Processes, run: Run) -> None:
    script = (
        "from aijobs import workers; print(workers.maintenance._registry.periodic_tasks, "
        "list(workers.interactive._registry._registry), list(workers.background._registry._registry))"
    )
    folder = run.new_folder("nothing")
    env = {"AIJOBS_LEASE_S": "rubbish", "AIJOBS_INSTANCE_PATH": str(folder / "never-made")}
    program = processes.spawn([sys.executable, "-c", script], env=env)

    assert program.wait(30) == 0
    for name in ("dispatcher", "reaper", "redrive", "claim_release", "snapshot_cleanup"):
        assert f"aijobs.workers.{name}:" in program.output
    assert program.output.count("'aijobs.workers.run_job'") == 2
    assert list(folder.iterdir()) == []


def test_created_job_is_handed_over_and_succeeds(site: Site) -> None:
    consumer = site.start("interactive", "-w", "2")

    job = site.wait_for(site.create(), "succeeded")

    assert (job.artifact_count, job.attempt_no, job.lost_count) == (2, 1, 0)
    assert site.history(job.id) == ["created", "locked", "succeeded"]
    assert consumer.stop() == 0
    assert site.services.presence.read() == []


@pytest.mark.long
def test_job_created_during_a_broker_outage_runs_after_it(
    build_site: SiteBuilder, start_valkey: Callable[..., ValkeyServer]
) -> None:
    server = start_valkey()
    site = build_site(server.url)
    server.stop()
    maintenance = site.start("maintenance", "-w", "1")
    worker = site.start("interactive", "-w", "1")
    job_id = site.create()
    assert site.history(job_id) == ["created"]

    server.start()

    site.wait_for(job_id, "succeeded")
    for consumer in (maintenance, worker):
        assert "Traceback" not in consumer.output
        assert consumer.stop() == 0


def test_job_of_a_killed_worker_is_taken_over_by_the_next_on_its_host(site: Site) -> None:
    first = site.start("interactive", "-w", "1")
    job_id = site.create({"sleep_ms": 600_000}, {"artifacts": 1})
    site.wait_for(job_id, "running")
    poll(lambda: site.active_jobs() == [job_id], what="the heartbeat names the job")

    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    site.start("interactive", "-w", "1")
    site.start("maintenance")

    job = site.wait_for(job_id, "succeeded")
    assert (job.attempt_no, job.lost_count, job.uncharged_losses) == (2, 0, 1)
    assert site.history(job_id) == ["created", "locked", "lease_lost", "locked", "succeeded"]


def test_starting_maintenance_consumer_takes_leases_of_killed_workers_on_its_host(
    build_site: SiteBuilder, redis_url: str
) -> None:
    site = build_site(redis_url, AIJOBS_LEASE_S="86400")  # The lease doesn't expire during the test.
    worker = site.start("interactive", "-w", "1")
    job_id = site.create({"sleep_ms": 600_000}, {"artifacts": 1})
    held = site.wait_for(job_id, "running")

    worker.kill()
    site.start("maintenance", "-w", "1")
    poll(lambda: site.job(job_id).locked_by is None, timeout=30, what="the job is released")

    job = site.job(job_id)
    assert (job.lifecycle_status, job.attempt_no, job.uncharged_losses) == ("running", 1, 1)
    assert job.next_attempt_at < held.lock_until - timedelta(hours=23)
    assert site.history(job_id) == ["created", "locked", "lease_lost"]
    poll(lambda: site.services.broker.pending_count("ai-interactive") == 1, what="its next attempt waits for a worker")


@pytest.mark.long
def test_jobs_of_killed_workers_are_not_shown_as_running_for_ever(
    build_site_on_each: SiteBuilder, redis_url: str, tmp_path: Path
) -> None:
    """Kill two workers during a call: one is the last loss that a job may have, the other is a job's first loss."""
    with FakeLlm() as llm:
        llm.script(faults.hang())
        providers = tmp_path / "providers.toml"
        providers.write_text(PROVIDERS.format(url=llm.url))
        # Not shorter: on a busy machine a live worker must not count as lost.
        leases = SHORT_LEASES | {"AIJOBS_LEASE_S": "4"}
        site = build_site_on_each(redis_url, AIJOBS_PROVIDERS=str(providers), **leases)
        # Started before the kill, so that no starting consumer releases the jobs.
        maintenance = site.start("maintenance", "-w", "1")
        lost_before, background = (site.spawn(queue, "-w", "1") for queue in ("interactive", "background"))
        ending, going_on = jobs = [site.create({"sleep_ms": 600_000}), site.order("flashcard_generation", SAMPLE_INPUT)]
        poll(lambda: sorted(site.active_jobs()) == jobs, timeout=30, what="the heartbeats name the jobs")
        lost_before.kill()
        interactive = site.start("interactive", "-w", "1")
        poll(lambda: sorted(site.active_jobs()) == [ending, *jobs], timeout=30, what="another has the first one's job")
        with site.services.database.transaction() as session:  # The next loss fails the job.
            session.execute(update(AiJob).where(AiJob.id == ending).values(uncharged_losses=4))
        llm.wait_for_calls(1)
        client = create_app(services=site.services).test_client()
        token = {"Authorization": f"Bearer {issue_user_token(site.services.settings, USER, hours=1)}"}

        def ask() -> list[dict[str, Any]]:
            return [client.get(f"/api/ai/jobs/{job_id}", headers=token).json for job_id in jobs]

        assert [job["phase"] for job in ask()] == ["running", "running"]
        for worker in (interactive, background):
            worker.kill()
        settings = site.services.settings
        poll(
            lambda: "running" not in [job["phase"] for job in ask()],
            timeout=settings.lease_s + settings.lease_grace_s + settings.reaper_s + BUSY_S,
            what="no job is shown as running",
        )

    failed, retrying = ask()
    assert (failed["lifecycleStatus"], failed["errorCode"]) == ("failed", "INTERNAL_WORKER_LOST")
    assert failed["publicErrorMessage"] == describe("INTERNAL_WORKER_LOST").en, "and no stack trace"
    assert (retrying["phase"], retrying["attempt"]) == ("retrying", 1)
    assert site.history(ending) == ["created", "locked", "lease_lost", "locked", "lease_lost", "failed"]
    assert site.history(going_on) == ["created", "locked", "provider_called", "lease_lost"]

    with site.services.database.engine.begin() as connection:
        add_operators(connection)
    console = Console(client)
    console.sign_in("viewer")
    why = [console.soup(f"/console/jobs/{job_id}").find(id="job-why").get_text() for job_id in jobs]
    assert "INTERNAL_WORKER_LOST" in why[0]
    assert "It now runs alone in a process of its own" in why[1]
    running = console.soup("/console/queues").find_all("dt", string="Running")
    assert [count.find_next("dd").get_text(strip=True) for count in running] == ["0", "0"]
    dead = {worker.pid for worker in (lost_before, interactive, background)}
    shown = {pid: worker for pid, worker in _workers_shown(console).items() if pid in dead}
    assert shown == dict.fromkeys(dead, ("late", "0 of 1")), "no worker is shown with a job that it has lost"
    # The page shows workers that have a heartbeat or hold a job. Delete the heartbeats instead of waiting for their
    # end.
    beats = [beat.instance_id for beat in site.services.presence.read() if beat.pid in dead]
    site.services.broker.client.delete(*(HEARTBEAT_PREFIX + instance for instance in beats))
    assert set(_workers_shown(console)) == {maintenance.pid}


def _workers_shown(console: Console) -> dict[int, tuple[str, str]]:
    """Return state and number of jobs of each worker on the console's page of workers, by pid."""
    table = console.soup("/console/workers").find("section", attrs={"aria-label": "List of workers"})
    return {
        int(row.th.find(class_="strong").get_text().rpartition(":")[2]): (
            row.find(class_="state")["data-state"],
            row.find("td", attrs={"data-label": "Active"}).find(string=True),
        )
        for row in table.tbody.find_all("tr")
    }


def test_deploy_loses_no_attempt(site: Site) -> None:
    first = site.start("interactive", "-w", "2", AIJOBS_SHUTDOWN_GRACE_S="1")
    job_id = site.create({"sleep_ms": 600_000}, {"artifacts": 1})
    poll(lambda: site.active_jobs() == [job_id], what="the heartbeat names the job")

    assert first.stop() == 0
    assert site.history(job_id) == ["created", "locked", "released"]
    assert site.services.presence.read() == []
    site.start("maintenance")
    site.start("interactive")

    job = site.wait_for(job_id, "succeeded")
    assert (job.attempt_no, job.lost_count) == (2, 0)


def test_message_lost_by_redis_is_sent_again(site: Site, valkey: ValkeyServer) -> None:
    site.start("maintenance", AIJOBS_REDRIVE_S="1", AIJOBS_REDRIVE_DUE_S="1")
    job_id = site.create()
    poll(lambda: site.event_of(job_id).status == OutboxState.PUBLISHED, what="the event is published")

    valkey.flush()
    poll(lambda: site.event_of(job_id).redrives >= 1, what="the message is sent again")
    site.start("interactive")

    assert site.wait_for(job_id, "succeeded").attempt_no == 1


def test_job_runs_under_the_documented_redis_user(
    build_site: SiteBuilder, start_valkey: Callable[..., ValkeyServer]
) -> None:
    server = start_valkey(f"user aijobs on >secret {ACL_RULES}")
    site = build_site(server.url_for("aijobs", "secret"))
    consumers = [site.start("interactive"), site.start("maintenance")]

    site.wait_for(site.create(), "succeeded")

    for consumer in consumers:
        assert consumer.stop() == 0
    with server.client() as admin:
        assert admin.acl_log() == []


def test_consumer_without_option_w_has_the_threads_of_its_queue_policy(site: Site) -> None:
    consumers = [site.start("interactive"), site.start("background"), site.start("background", "-w", "1")]
    consumers.append(site.start("interactive", "-w", "3"))

    slots = poll(lambda: _slots_of(site, consumers), timeout=30, what="four heartbeats")
    assert slots == [INTERACTIVE.concurrency, BACKGROUND.concurrency, 1, 3]


def _slots_of(site: Site, consumers: list[Program]) -> list[int | None] | None:
    found = {worker.pid: worker.slots for worker in site.services.presence.read()}
    return [found[one.pid] for one in consumers] if all(one.pid in found for one in consumers) else None


@pytest.mark.parametrize("queue", ["interactive", "maintenance"])
def test_database_without_a_schema_is_refused_in_one_line(
    site: Site, queue: str, create_sqlite_database: Callable[..., str]
) -> None:
    consumer = site.spawn(queue, AIJOBS_DATABASE_URL=create_sqlite_database())

    assert consumer.wait(30) == 1
    assert consumer.output == "aijobs: the database has no schema yet: run `aijobs db upgrade`\n"


def test_unreachable_database_is_refused_in_one_line_without_its_password(site: Site) -> None:
    url = f"postgresql+psycopg://someone:canary-password@127.0.0.1:{free_port()}/nowhere"

    consumer = site.spawn("background", AIJOBS_DATABASE_URL=url)

    assert consumer.wait(30) == 1
    (line,) = consumer.output.splitlines()
    assert line.startswith("aijobs: the database at AIJOBS_DATABASE_URL doesn't answer")
    assert "canary-password" not in line


def test_consumer_output_is_json_lines(site: Site) -> None:
    consumers = [site.start(queue) for queue in ("interactive", "background", "maintenance")]
    site.wait_for(site.create(), "succeeded")

    for consumer in consumers:
        assert consumer.stop() == 0
        assert all(isinstance(json.loads(line), dict) for line in consumer.output.splitlines())
