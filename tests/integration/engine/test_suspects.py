"""Suspects in a real child process: how they end, how that is announced, and which deaths are charged."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from sqlalchemy import select, update

from aijobs.engine.child_attempts import DEPRIORITISED_S
from aijobs.engine.engine import ExecutionEngine
from aijobs.engine.outcome import Outcome
from aijobs.events import DomainEvent
from aijobs.ids import InstanceId
from aijobs.jobs.lease import JobErrorInfo, lease_of
from aijobs.jobs.models import AiJob, AiJobArtifact, AiJobEvent
from aijobs.jobs.requests import CreateJobInput
from aijobs.jobs.status import END_EVENTS
from aijobs.outbox.repository import outgoing
from aijobs.queues.message import JobMessage
from aijobs.settings import Settings
from aijobs.wiring.engine import build_engine
from aijobs.wiring.services import Services, build_services
from tests.integration.engine.stage import RecordingPresence
from tests.support import deadly_job
from tests.support.messages import SECRET
from tests.support.plug_ins import plug_in
from tests.support.polling import poll
from tests.support.processes import Run
from tests.support.rows import prepare_database

ROOT = Path(__file__).parents[3]
START_S = 60
"""How long a busy machine may take to start a child."""


@dataclass
class Worker:
    """A worker in this process, with its children."""

    services: Services
    engine: ExecutionEngine
    presence: RecordingPresence
    heard: list[DomainEvent] = field(default_factory=list)

    def new_job(self, *calls: dict[str, Any], user: str = "learner") -> str:
        """Create a deadly job that has lost no worker."""
        request = CreateJobInput(user, deadly_job.JOB_TYPE, "Note", "n", {"calls": list(calls) or [{}]})
        return self.services.jobs.create_job(request).job.id

    def new_suspect(self, *calls: dict[str, Any], **columns: Any) -> str:
        """Create a deadly job that has lost a worker, which ran other jobs too."""
        job_id = self.new_job(*calls)
        with self.services.database.transaction() as session:
            values = {"uncharged_losses": 1, **columns}
            session.execute(update(AiJob).where(AiJob.id == job_id).values(**values))
        return job_id

    def message(self, job_id: str) -> JobMessage:
        with self.services.database.read() as session:
            job = session.get(AiJob, job_id)
            event = self.services.outbox_events.enqueue_event(session, job)
            return replace(outgoing(event, job).message, event_id=event.id)

    def run(self, job_id: str) -> AiJob:
        """Deliver the message of a suspect, and run it as soon as a child is ready."""
        assert self.engine.execute(self.message(job_id)) == Outcome.SET_APART
        poll(self.engine.run_suspect, timeout=START_S, what="the suspect was run")
        return self.job(job_id)

    def job(self, job_id: str) -> AiJob:
        job = self.services.lifecycle.find(job_id)
        assert job is not None
        return job

    def ran_in(self, job_id: str) -> int:
        """Return the pid of the process in which the job succeeded."""
        with self.services.database.read() as session:
            query = select(AiJobArtifact.artifact_id).where(AiJobArtifact.job_id == job_id)
            return int(session.execute(query).scalar_one())

    def history(self, job_id: str) -> list[tuple[str, str | None]]:
        """Return types and error codes of the job's history."""
        with self.services.database.read() as session:
            query = select(AiJobEvent.type, AiJobEvent.error_code).where(AiJobEvent.job_id == job_id)
            return [(kind, code) for kind, code in session.execute(query.order_by(AiJobEvent.seq))]

    def children(self) -> list[psutil.Process]:
        """Return the child processes for suspects."""
        return [child for child in psutil.Process().children() if "importlib" in " ".join(child.cmdline())]

    def events(self, job_id: str) -> list[str]:
        """Return the job's events on the bus of this process."""
        return [event.type for event in self.heard if event.job_id == job_id]


@pytest.fixture
def worker(
    run: Run,
    create_sqlite_database: Callable[..., str],
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Worker]:
    env = {
        "AIJOBS_INSTANCE_PATH": str(tmp_path),
        "AIJOBS_DATABASE_URL": create_sqlite_database(prepare_database),
        "AIJOBS_REDIS_URL": redis_url,
        "AIJOBS_MESSAGE_KEYS": f"k1:{SECRET}",
        "AIJOBS_WATCHER_S": "0.1",
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)  # The child reads its own settings.
    monkeypatch.syspath_prepend(plug_in(tmp_path / "plug-in", "aijobs-deadly", {"deadly": "tests.support.deadly_job"}))
    services, presence = build_services(Settings.load(env)), RecordingPresence()
    engine = build_engine(services, presence, InstanceId.current(), lambda: None)  # type: ignore[arg-type]
    engine.start()
    worker = Worker(services, engine, presence)
    for event_type in END_EVENTS.values():
        services.bus.subscribe(event_type, worker.heard.append)
    yield worker
    engine.drain(0)
    engine.close()
    services.database.dispose()
    services.broker.client.close()


def test_innocent_suspects_succeed_in_one_child_and_their_ends_are_announced_here(worker: Worker) -> None:
    first, second = worker.new_suspect(), worker.new_suspect()

    assert [worker.run(job_id).lifecycle_status for job_id in (first, second)] == ["succeeded"] * 2

    assert worker.ran_in(first) == worker.ran_in(second) != os.getpid()
    assert worker.events(first) == worker.events(second) == ["ai.job.completed"]
    assert worker.presence.seen[:2] == [("started", first), ("finished", first)]
    assert Path(f"/proc/{worker.ran_in(first)}/oom_score_adj").read_text().strip() == "1000"
    assert worker.job(first).losses == 1


def test_death_of_a_child_is_charged_and_the_child_is_replaced(worker: Worker) -> None:
    poison, innocent = worker.new_suspect({"way": "segv"}), worker.new_suspect()

    assert worker.run(poison).lifecycle_status == "running"

    job = worker.job(poison)
    assert (job.locked_by, job.lost_count, job.uncharged_losses) == (None, 1, 1)
    assert worker.history(poison)[-1] == ("lease_lost", "INTERNAL_WORKER_LOST")
    assert worker.run(innocent).lifecycle_status == "succeeded"


def test_suspect_is_not_charged_for_a_child_that_ran_another_job(worker: Worker, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    alive.touch()
    before = worker.new_suspect({"way": "later", "wait_for": str(alive)})
    innocent = worker.new_suspect({"way": "removes", "wait_for": str(alive)}, {})
    assert worker.run(before).lifecycle_status == "succeeded"

    job = worker.run(innocent)

    assert (job.locked_by, job.lost_count, job.uncharged_losses) == (None, 0, 2)
    assert worker.history(innocent)[-1] == ("lease_lost", None)


def test_suspect_whose_child_died_runs_next_in_a_fresh_child(worker: Worker) -> None:
    before, innocent = worker.new_suspect(), worker.new_suspect(uncharged_losses=2)
    assert worker.run(before).lifecycle_status == "succeeded"
    assert worker.run(innocent).lifecycle_status == "succeeded"
    assert worker.ran_in(before) != worker.ran_in(innocent)


def test_death_of_a_child_that_leaves_a_fork_is_charged(worker: Worker) -> None:
    assert worker.run(worker.new_suspect({"way": "leaves a fork"})).lost_count == 1


def test_last_charged_death_fails_the_job_and_is_announced_here(worker: Worker) -> None:
    poison = worker.new_suspect({"way": "memory"}, lost_count=1)

    job = worker.run(poison)

    assert (job.lifecycle_status, job.error_code, job.lost_count) == ("failed", "INTERNAL_WORKER_LOST", 2)
    assert worker.events(poison) == ["ai.job.failed"]


def test_retry_of_a_job_that_failed_by_lost_workers_runs_in_a_child(worker: Worker) -> None:
    lifecycle, parent = worker.services.lifecycle, worker.new_suspect()
    lease = lease_of(lifecycle.lock_job(parent, "another-worker").job)
    lifecycle.mark_failed(lease, JobErrorInfo.of("INTERNAL_WORKER_LOST", "gone"))

    retry = worker.services.jobs.retry(parent, "operator:ann").job.id

    assert worker.run(retry).lifecycle_status == "succeeded"
    assert worker.ran_in(retry) != os.getpid()


@pytest.mark.long
def test_deadline_kills_a_stuck_child_without_a_charge(worker: Worker) -> None:
    job = worker.run(worker.new_suspect({"way": "stuck"}))

    assert (job.lifecycle_status, job.error_code, job.lost_count) == ("failed", "TIMEOUT", 0)
    assert worker.events(job.id) == ["ai.job.failed"]
    assert not worker.children()


def test_cancel_kills_a_stuck_child_without_a_charge(worker: Worker) -> None:
    job_id = worker.new_suspect({"way": "stuck"})
    worker.engine.execute(worker.message(job_id))
    slot = threading.Thread(target=lambda: poll(worker.engine.run_suspect, timeout=START_S))
    slot.start()
    poll(lambda: worker.job(job_id).locked_by is not None, timeout=START_S, what="the suspect runs")
    worker.services.jobs.cancel(job_id, "learner")
    slot.join(START_S)

    job = worker.job(job_id)
    assert (job.lifecycle_status, job.lost_count) == ("cancelled", 0)
    assert worker.events(job.id) == ["ai.job.cancelled"]


def test_orphaned_child_ends_by_its_own_alarm(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aijobs.engine.child_attempts.ORPHAN_S", -4, raising=False)  # Before its parent would kill it.
    assert worker.run(worker.new_suspect({"way": "stuck"})).lost_count == 1


@pytest.mark.parametrize(
    "answer",
    [
        '{"token": "another", "outcome": "succeeded", "events": []}',
        pytest.param('{"outcome": "succeeded"}', marks=pytest.mark.long),
        pytest.param('["succeeded"]', marks=pytest.mark.long),
        "[" * 100_000,
    ],
    ids=["of another attempt", "of no attempt", "of another shape", "no JSON"],
)
def test_child_with_an_invalid_answer_is_killed_and_charged(worker: Worker, answer: str) -> None:
    assert worker.run(worker.new_suspect({"way": "answers", "answer": answer})).lost_count == 1
    assert worker.run(worker.new_suspect()).lifecycle_status == "succeeded"


def test_fork_of_a_child_runs_no_other_job(worker: Worker) -> None:
    job_id = worker.new_suspect({"way": "both return"})
    assert worker.run(job_id).lifecycle_status == "succeeded"
    assert worker.events(job_id) == ["ai.job.completed"]
    (child,) = worker.children()

    def gone() -> bool:
        return all(fork.status() == psutil.STATUS_ZOMBIE for fork in child.children())

    poll(gone, what="the fork has ended")
    assert worker.run(worker.new_suspect()).lifecycle_status == "succeeded"


def test_standard_input_of_a_suspect_is_empty(worker: Worker) -> None:
    assert worker.run(worker.new_suspect({"way": "cat"})).lifecycle_status == "succeeded"


def test_repeated_message_of_a_waiting_suspect_is_dropped(worker: Worker) -> None:
    job_id = worker.new_suspect()
    for _ in range(3):
        assert worker.engine.execute(worker.message(job_id)) == Outcome.SET_APART
    poll(worker.engine.run_suspect, timeout=START_S, what="the suspect was run")
    assert not worker.engine.run_suspect(), "only one run was waiting"
    assert [kind for kind, _ in worker.history(job_id)] == ["created", "locked", "succeeded"]


def test_slot_does_not_wait_for_a_starting_child(worker: Worker) -> None:
    worker.engine.execute(worker.message(worker.new_suspect()))
    assert worker.engine.run_suspect() is False, "the slot is free for other jobs"


def test_failed_start_of_a_child_is_not_charged(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    monkeypatch.setattr("aijobs.engine.child.MODULE", "aijobs.no_such_module")
    job_id = worker.new_suspect()
    worker.engine.execute(worker.message(job_id))

    def failed() -> bool:
        assert not worker.engine.run_suspect()
        return "suspects.child_failed" in [line["event"] for line in log_lines()]

    poll(failed, timeout=START_S, what="a start failed")
    assert worker.job(job_id).losses == 1
    assert [kind for kind, _ in worker.history(job_id)] == ["created"]


def test_after_a_loss_only_the_job_that_kills_its_child_is_charged(worker: Worker) -> None:
    poison, innocent = worker.new_job({"way": "exit"}), worker.new_job()
    worker.engine.alarm()

    for job_id in (poison, innocent):
        poll(lambda job_id=job_id: worker.engine.execute(worker.message(job_id)) != Outcome.PUT_BACK, timeout=START_S)

    assert worker.job(poison).lost_count == 1, "the child was fresh"
    assert worker.job(innocent).lifecycle_status == "succeeded"
    assert worker.ran_in(innocent) != os.getpid()
    assert worker.events(innocent) == ["ai.job.completed"]


def test_after_a_loss_jobs_of_other_users_come_before_those_of_the_user_who_caused_it(worker: Worker) -> None:
    poison, next_one = worker.new_job({"way": "exit"}), worker.new_job()
    other = worker.new_job(user="another")
    worker.engine.alarm()
    poll(lambda: worker.engine.execute(worker.message(poison)) != Outcome.PUT_BACK, timeout=START_S)

    poll(lambda: worker.engine.execute(worker.message(next_one)) != Outcome.PUT_BACK, timeout=START_S)

    assert worker.job(other).lifecycle_status == "succeeded"
    assert worker.job(next_one).lifecycle_status == "queued"


def test_next_job_of_a_user_whose_job_killed_a_child_runs_in_a_child_too(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison, next_one = worker.new_job({"way": "exit"}), worker.new_job()
    worker.new_job(user="another")
    worker.engine.alarm()
    poll(lambda: worker.engine.execute(worker.message(poison)) != Outcome.PUT_BACK, timeout=START_S)
    waited = time.monotonic() + DEPRIORITISED_S

    with monkeypatch.context() as later:
        later.setattr("aijobs.jobs.lifecycle.fairness.time", Mock(monotonic=lambda: waited))
        later.setattr("aijobs.engine.isolation.time", Mock(monotonic=lambda: waited))
        poll(lambda: worker.engine.execute(worker.message(next_one)) != Outcome.PUT_BACK, timeout=START_S)

    assert worker.job(next_one).lifecycle_status == "succeeded"
    assert worker.ran_in(next_one) != os.getpid()


def test_suspect_runs_before_jobs_of_users_who_come_first(worker: Worker) -> None:
    suspect, other = worker.new_suspect(uncharged_losses=2), worker.new_job(user="another")
    worker.services.lifecycle.deprioritise("learner", 60)

    assert worker.run(suspect).lifecycle_status == "succeeded"
    assert worker.job(other).lifecycle_status == "queued"


def test_jobs_run_in_the_worker_again_after_a_while_without_a_loss(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aijobs.engine.isolation.ALARM_S", 0.0)
    worker.engine.alarm()
    job_id = worker.new_job()
    assert worker.engine.execute(worker.message(job_id)) == Outcome.SUCCEEDED
    assert worker.ran_in(job_id) == os.getpid()


def test_message_is_put_back_if_no_child_is_ready_after_a_loss(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aijobs.engine.child.MODULE", "aijobs.no_such_module")
    monkeypatch.setattr("aijobs.engine.isolation.CHILD_WAIT_S", 0.1)
    worker.engine.alarm()
    job_id = worker.new_job()
    assert worker.engine.execute(worker.message(job_id)) == Outcome.PUT_BACK
    assert [kind for kind, _ in worker.history(job_id)] == ["created"]
