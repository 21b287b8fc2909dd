"""Jobs that kill their process: they die alone, and `huey_consumer` runs the other jobs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select, update

from aijobs.ids import InstanceId
from aijobs.jobs.models import AiJob, AiJobEvent
from aijobs.jobs.requests import CreateJobInput
from aijobs.jobs.status import FINAL
from tests.integration.queues.test_workers import Site
from tests.support import deadly_job
from tests.support.plug_ins import plug_in
from tests.support.polling import poll
from tests.support.processes import Processes, Program, Run
from tests.support.rows import prepare_database

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120
"""Each death of a process is followed by a start, which is slow on a busy machine."""


class DeadlySite(Site):
    """A site whose workers know the deadly job type, and whose interactive worker is restarted when it dies."""

    worker: Program
    options: Sequence[str] = ()
    starts = 0
    """Number of starts of the interactive worker."""

    def keep_worker(self, *options: str) -> None:
        """Start the interactive worker with options for its restarts."""
        self.options = options
        self.worker = self.start("interactive", *options)
        self.starts += 1

    def order_of(self, user: str, *calls: dict[str, Any]) -> str:
        """Create a deadly job of this user."""
        request = CreateJobInput(user, deadly_job.JOB_TYPE, "Note", "note-1", {"calls": list(calls) or [{}]})
        return self.services.jobs.create_job(request).job.id

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait, and restart the worker whenever it has died."""

        def look() -> bool:
            if not self.worker.is_running:
                self.keep_worker(*self.options)
            return done()

        poll(look, timeout=PATIENCE_S, what=what)

    def all_final(self, *job_ids: str) -> bool:
        return all(self.job(job_id).lifecycle_status in FINAL for job_id in job_ids)

    def make_suspect(self, job_id: str) -> None:
        """Write the row as after one loss of a shared worker."""
        with self.services.database.transaction() as session:
            session.execute(update(AiJob).where(AiJob.id == job_id).values(uncharged_losses=1))

    def losses(self, job_id: str) -> tuple[int, int]:
        """Return charged and uncharged losses from the row; assert that the history agrees."""
        job = self.job(job_id)
        with self.services.database.read() as session:
            rows = session.execute(
                select(AiJobEvent.error_code).where(AiJobEvent.job_id == job_id, AiJobEvent.type == "lease_lost")
            )
            charged = [code is not None for code in rows.scalars()]
        assert (job.lost_count, job.uncharged_losses) == (charged.count(True), charged.count(False))
        return job.lost_count, job.uncharged_losses

    def children(self) -> list[psutil.Process]:
        """Return the child processes of the worker."""
        return psutil.Process(self.worker.pid).children(recursive=True)

    def wait_for_child(self, job_id: str) -> psutil.Process:
        """Wait until the child runs the job, and return it."""
        poll(lambda: self.job(job_id).locked_by is not None, timeout=60, what=f"{job_id} is run")
        (child,) = self.children()
        return child


@pytest.fixture
def site(
    processes: Processes, run: Run, create_sqlite_database: Callable[..., str], redis_url: str
) -> Iterator[DeadlySite]:
    folder = plug_in(run.new_folder("plug-in"), "aijobs-deadly", {"deadly": "tests.support.deadly_job"})
    path = {"PYTHONPATH": f"{folder}:{ROOT}", "AIJOBS_DISPATCHER_S": "0.2"}
    site = DeadlySite(processes, run.new_folder("site"), create_sqlite_database(prepare_database), redis_url, path)
    site.services.registry.load([deadly_job], production=False)
    yield site
    site.services.database.dispose()
    site.services.broker.client.close()


@pytest.mark.parametrize(
    ("workers", "ways"),
    [pytest.param("1", ["exit"], marks=pytest.mark.long), ("2", ["segv", "memory", "exit"])],
    ids=["one", "two"],
)
def test_poison_jobs_die_alone_and_good_jobs_succeed(site: DeadlySite, workers: str, ways: list[str]) -> None:
    site.start("maintenance", "-w", "1")
    poison = [site.order_of("poisoner", {"way": way}) for way in ways]
    good = [site.order_of(f"learner-{n}", {"sleep_ms": 200}) for n in range(3)]
    site.keep_worker("-w", workers)

    site.wait_until(lambda: site.all_final(*good, *poison), what="all jobs have ended")

    for job_id in good:
        assert site.job(job_id).lifecycle_status == "succeeded"
        assert site.losses(job_id)[0] == 0, "an innocent job is charged with no loss"
    for job_id in poison:
        job = site.job(job_id)
        assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_WORKER_LOST")
        assert site.losses(job_id)[0] == 2, "it fails at its own second death"
        assert site.history(job_id)[-3:] == ["locked", "lease_lost", "failed"]
    assert site.starts == 2, "one worker process is lost, however many jobs kill theirs"


def test_sigterm_releases_a_suspect_uncharged_and_ends_its_child(site: DeadlySite) -> None:
    job_id = site.order_of("learner", {"way": "stuck"})
    site.make_suspect(job_id)
    site.keep_worker("-w", "2", "-t", "0.5")
    child = site.wait_for_child(job_id)

    site.worker.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGTERM)  # Some supervisors signal the whole process group.

    assert site.worker.wait(30) == 0
    assert not child.is_running()
    assert site.history(job_id) == ["created", "locked", "released"]
    assert site.job(job_id).lost_count == 0
    assert all(isinstance(json.loads(line), dict) for line in site.worker.output.splitlines())


def test_killed_worker_leaves_no_child_and_its_suspect_is_not_charged(site: DeadlySite) -> None:
    job_id = site.order_of("learner", {"way": "stuck"}, {})
    site.make_suspect(job_id)
    site.keep_worker("-w", "1")
    child = site.wait_for_child(job_id)

    site.worker.kill()
    poll(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, what="the child is gone")
    site.start("maintenance", "-w", "1")

    site.wait_until(lambda: site.all_final(job_id), what="the job has ended")
    job = site.job(job_id)
    assert (job.lifecycle_status, job.lost_count, job.uncharged_losses) == ("succeeded", 0, 2)


def test_child_ends_with_its_worker_even_if_a_job_left_a_fork(site: DeadlySite) -> None:
    stays = site.services.settings.instance_path / "stays"
    suspect = site.order_of("learner")
    site.make_suspect(suspect)
    site.keep_worker("-w", "1")
    poll(lambda: site.all_final(suspect), timeout=60, what="the child is there")
    (child,) = site.children()
    stays.touch()
    forker = site.order_of("learner", {"way": "forks", "wait_for": str(stays)})
    poll(lambda: site.all_final(forker), timeout=60, what="the worker has forked")
    (fork,) = [process for process in site.children() if process != child]

    site.worker.kill()

    poll(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, what="the child is gone")
    assert fork.is_running()
    stays.unlink()
    poll(lambda: not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE, what="the fork is gone")


def test_worker_of_a_restarted_container_survives_the_next_job_that_kills_its_process(
    site: DeadlySite,
) -> None:
    held, poison = site.order_of("learner"), site.order_of("poisoner", {"way": "exit"})
    before = replace(InstanceId.current(), pid_namespace="1")
    site.services.lifecycle.lock_job(held, str(before))
    site.keep_worker("-w", "2")

    poll(lambda: site.losses(poison)[0] == 1, timeout=60, what="the job has killed its process")

    assert site.worker.is_running
    assert site.job(held).locked_by is not None, "its worker may live"


def test_suspects_run_one_at_a_time_and_do_not_delay_good_jobs(site: DeadlySite) -> None:
    go = site.services.settings.instance_path / "go"
    suspects = [site.order_of("poisoner", {"wait_for": str(go)}) for _ in range(3)]
    for job_id in suspects:
        site.make_suspect(job_id)
    site.keep_worker("-w", "2")
    poll(lambda: len(site.active_jobs()) == 1, timeout=60, what="one suspect runs")

    good = [site.order_of(f"learner-{n}") for n in range(5)]
    poll(lambda: site.all_final(*good), timeout=60, what="the good jobs have ended")

    assert {site.job(job_id).lifecycle_status for job_id in good} == {"succeeded"}
    assert [site.job(job_id).attempt_no for job_id in suspects].count(1) == 1, "one at a time"
    go.touch()
    poll(lambda: site.all_final(*suspects), timeout=60, what="the suspects have ended, one after another")
    assert {site.job(job_id).lifecycle_status for job_id in suspects} == {"succeeded"}
