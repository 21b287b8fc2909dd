"""Web processes as their unit starts them: a stop during requests, and many processes on one SQLite file."""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import signal
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from aijobs.cli.tokens import issue_user_token
from aijobs.clock import utc_now
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import FINAL
from aijobs.local.station import answers
from aijobs.monitor.check import Check
from aijobs.outbox.models import OutboxEvent, OutboxEventType, QueuePause
from aijobs.settings import Settings
from aijobs.wiring.services import Services, build_services
from tests.support.databases import ANY_DATABASE, SERVER_FIRST
from tests.support.polling import poll
from tests.support.ports import free_port
from tests.support.processes import Processes, Program, Run
from tests.support.rows import prepare_database

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "aijobs-web.service"
PATH = "/api/learning/flashcards"
BODY = json.dumps(
    {
        "lang": "en",
        "source": {"id": "note-1", "title": "Osmosis"},
        "segments": [{"sid": "p1", "text": "Osmosis is the movement of water across a partially permeable membrane."}],
    }
)
ENOUGH = 24
"""Answers of all learners together after which the process is stopped."""


class Site:
    """A database, a broker, and a succession of web processes."""

    def __init__(self, processes: Processes, folder: Path, database_url: str, redis_url: str) -> None:
        self._processes, self._folder = processes, folder
        self.port = free_port()
        self.env = {
            "AIJOBS_ENV": "production",
            "AIJOBS_INSTANCE_PATH": str(folder),
            "AIJOBS_DATABASE_URL": database_url,
            "AIJOBS_REDIS_URL": redis_url,
            "AIJOBS_SECRET_KEY": "s" * 32,
            "AIJOBS_MESSAGE_KEYS": f"k1:{'m' * 32}",
            "AIJOBS_CREDENTIAL_KEYS": f"k1:{'c' * 32}",
            "AIJOBS_JWT_SECRET": "j" * 32,
            "AIJOBS_USER_ACTIVE_JOBS": "0",
        }
        self.services: Services = build_services(Settings.load(self.env))
        self.token = issue_user_token(self.services.settings, "ana", hours=1)

    def start(self, *options: str) -> Program:
        """Start a web process with the unit's command, another address and these options; wait until it answers."""
        (line,) = [line for line in UNIT.read_text("utf-8").splitlines() if line.startswith("ExecStart=")]
        program, *arguments = line.removeprefix("ExecStart=").split()
        arguments[arguments.index("--bind") + 1] = f"127.0.0.1:{self.port}"
        command = [str(Path(sys.executable).with_name(Path(program).name)), *arguments, *options]
        web = self._processes.spawn(command, env=self.env, cwd=self._folder, name="web")
        poll(lambda: not web.is_running or answers(f"http://127.0.0.1:{self.port}", 5), timeout=60, what="it answers")
        assert web.is_running, web.output
        return web

    def start_consumer(self, queue: str, *options: str) -> Program:
        """Start a consumer and wait until it works."""
        command = [str(Path(sys.executable).with_name("huey_consumer")), f"aijobs.workers.{queue}", *options]
        consumer = self._processes.spawn(command, env=self.env, cwd=self._folder, name=queue)
        consumer.wait_for_output("Huey consumer started", timeout=60)
        return consumer

    def headers(self, key: str, token: str | None = None) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {token or self.token}",
            "Content-Type": "application/json",
            "Idempotency-Key": key,
        }

    def connect(self) -> AbstractContextManager[http.client.HTTPConnection]:
        return closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30))

    def ask(self, connection: http.client.HTTPConnection, key: str) -> tuple[int, str]:
        """Request a job with this key; return the answer's status and the job's id."""
        connection.request("POST", PATH, BODY, self.headers(key))
        answer = connection.getresponse()
        return answer.status, str(json.loads(answer.read()).get("jobId"))

    def ask_anew(self, key: str) -> tuple[int, str]:
        """`ask` on a new connection."""
        with self.connect() as connection:
            return self.ask(connection, key)

    def look(self, connection: http.client.HTTPConnection) -> int:
        """List the user's own jobs, as an open page does; return the answer's status."""
        connection.request("GET", "/api/ai/jobs", headers=self.headers("unused"))
        answer = connection.getresponse()
        answer.read()
        return answer.status

    def ask_and_leave(self, key: str) -> None:
        """Request a job with this key, and disconnect before the answer."""
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers(key).items())
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(
                f"POST {PATH} HTTP/1.1\r\nHost: aijobs\r\nContent-Length: {len(BODY)}\r\n{head}\r\n{BODY}".encode()
            )

    def jobs(self) -> dict[str, str]:
        """Return the ids of all jobs by their keys."""
        with self.services.database.read() as session:
            found = session.execute(select(AiJob.idempotency_key, AiJob.id)).all()
        by_key = {key or "": job_id for key, job_id in found}
        assert len(by_key) == len(found), "each key has one job"
        return by_key

    def count_open(self) -> int:
        """Return the number of jobs that have not ended."""
        query = select(func.count()).select_from(AiJob).where(AiJob.lifecycle_status.not_in(FINAL))
        with self.services.database.read() as session:
            return session.execute(query).scalar_one()

    def enqueue_events(self) -> list[str]:
        """Return the job id of each enqueue event."""
        with self.services.database.read() as session:
            query = select(OutboxEvent.aggregate_id).where(OutboxEvent.event_type == OutboxEventType.ENQUEUE)
            return list(session.execute(query).scalars())


class Learner(threading.Thread):
    """Requests one job after another on one connection, until nobody accepts connections."""

    def __init__(self, site: Site, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._site = site
        self.answered: dict[str, tuple[int, str]] = {}
        self.cut_off: list[str] = []
        """Keys of requests that may have reached the process but got no answer."""

    def run(self) -> None:
        with self._site.connect() as connection:
            for key in (f"{self.name}-{number}" for number in itertools.count()):
                try:
                    self.answered[key] = self._site.ask(connection, key)
                except ConnectionRefusedError:
                    return
                except (OSError, http.client.HTTPException):
                    self.cut_off.append(key)
                    connection.close()  # The next request connects again.


@pytest.fixture
def site(processes: Processes, run: Run, create_database: Callable[..., str], redis_url: str) -> Iterator[Site]:
    opened = Site(processes, run.new_folder("site"), create_database(prepare_database), redis_url)
    yield opened
    opened.services.database.dispose()
    opened.services.broker.client.close()


@pytest.mark.long
@pytest.mark.parametrize("database_server", ["sqlite", "postgresql"], indirect=True)
def test_stopped_web_process_keeps_its_answers_and_doubles_no_repeated_job(
    site: Site,
) -> None:
    web = site.start()
    learners = [Learner(site, f"learner{number}") for number in range(4)]
    for learner in learners:
        learner.start()
    poll(lambda: sum(len(learner.answered) for learner in learners) >= ENOUGH, timeout=60, what="many were answered")
    left = [f"gone{number}" for number in range(8)]
    for key in left:
        site.ask_and_leave(key)
    web.send_signal(signal.SIGTERM)
    assert web.wait(60) == 0
    for learner in learners:
        learner.join(60)
        assert not learner.is_alive(), "a learner still waits"

    answered = {key: answer for learner in learners for key, answer in learner.answered.items()}
    cut_off = left + [key for learner in learners for key in learner.cut_off]
    assert {status for status, _ in answered.values()} == {202}
    before = site.jobs()
    assert {key: job_id for key, (_, job_id) in answered.items()}.items() <= before.items()
    assert sorted(site.enqueue_events()) == sorted(before.values()), "each job has exactly one enqueue event"
    assert before.keys() - answered.keys() <= set(cut_off)

    next_one = site.start()
    again = {key: [site.ask_anew(key) for _ in range(2)] for key in cut_off}
    after = site.jobs()
    for key, (first, second) in again.items():
        assert first == (200 if key in before else 202, after[key])
        assert second == (200, after[key])
    assert before.items() <= after.items()
    assert after.keys() == answered.keys() | set(cut_off)
    assert sorted(site.enqueue_events()) == sorted(after.values())
    assert next_one.stop(timeout=60) == 0
    assert "Traceback" not in web.output + next_one.output


@ANY_DATABASE
def test_last_stopped_process_leaves_one_complete_sqlite_file(site: Site, tmp_path: Path) -> None:
    program = site.start_consumer("interactive")
    file = Path(str(site.services.database.engine.url.database))
    with site.services.database.transaction() as session:
        session.add(QueuePause(queue_name="ai-background", reason="mark", paused_by="test", paused_at=utc_now()))
    site.services.database.dispose()

    assert program.stop(timeout=60) == 0
    assert sorted(path.name for path in file.parent.glob(f"{file.name}*")) == [file.name]
    copied = shutil.copyfile(file, tmp_path / "copied.db")
    with closing(sqlite3.connect(copied)) as connection:
        assert connection.execute("SELECT reason FROM queue_pauses").fetchall() == [("mark",)]


@pytest.mark.long
@ANY_DATABASE
def test_many_processes_on_one_sqlite_file_report_no_lock_error(site: Site) -> None:
    """SQLite allows one writer. Two web processes, two workers, all passes and seven clients share the file."""
    programs = [site.start(), site.start_consumer("maintenance", "-w", "1")]
    programs += [site.start_consumer("background", "-w", "2") for _ in range(2)]
    learners = [Learner(site, f"learner{number}") for number in range(4)]
    looks: list[int] = []
    over = threading.Event()

    def watch() -> None:
        with site.connect() as connection:
            while not over.is_set():
                looks.append(site.look(connection))

    pages = [threading.Thread(target=watch, daemon=True) for _ in range(3)]
    for thread in (*learners, *pages):
        thread.start()
    poll(lambda: sum(len(learner.answered) for learner in learners) >= 300, timeout=90, what="many were answered")
    over.set()
    for page in pages:
        page.join(60)
    assert programs[0].stop(timeout=60) == 0
    for learner in learners:
        learner.join(60)
    answered = [status for learner in learners for status, _ in learner.answered.values()]
    assert set(answered) == {202}
    assert set(looks) == {200}
    poll(lambda: not site.count_open(), timeout=60, what="all jobs have ended")
    with site.services.database.read() as session:
        ends = session.execute(select(AiJob.lifecycle_status, AiJob.lost_count + AiJob.uncharged_losses)).all()
    assert {(status, lost) for status, lost in ends} == {("succeeded", 0)}
    assert Check(site.services.database, site.services.clock, site.services.broker).run().findings == ()
    for program in programs[1:]:
        assert program.stop(timeout=60) == 0
    assert not [program.output for program in programs if "locked" in program.output.replace("job.locked", "")]


class Owner(threading.Thread):
    """A user who repeatedly requests a job and then lists their own jobs."""

    def __init__(self, site: Site, name: str, rounds: int) -> None:
        super().__init__(name=name, daemon=True)
        self._site, self._rounds = site, rounds
        self._token = issue_user_token(site.services.settings, name, hours=1)
        self.made: list[str] = []
        self.lists: list[list[str]] = []
        self.statuses: list[int] = []

    def run(self) -> None:
        for number in range(self._rounds):
            with self._site.connect() as connection:  # A new connection each time, to reach all processes.
                headers = self._site.headers(f"{self.name}-{number}", self._token)
                self.made.append(self._ask(connection, "POST", PATH, BODY, headers)["jobId"])
                found = self._ask(connection, "GET", "/api/ai/jobs?limit=100", None, headers)
                self.lists.append(sorted(job["jobId"] for job in found["jobs"]))

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None, headers: dict[str, str]
    ) -> dict[str, Any]:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        self.statuses.append(answer.status)
        return dict(json.loads(answer.read()))


@SERVER_FIRST
def test_forked_web_processes_answer_each_user_with_their_own_jobs(site: Site) -> None:
    web = site.start("--preload", "--workers", "2")
    owners = [Owner(site, f"owner{number}", rounds=3) for number in range(6)]
    for owner in owners:
        owner.start()
    for owner in owners:
        owner.join(60)
        assert not owner.is_alive(), "an owner still waits for an answer"

    for owner in owners:
        assert set(owner.statuses) == {200, 202}
        assert owner.lists == [sorted(owner.made[: number + 1]) for number in range(3)]
    assert web.stop(timeout=60) == 0
    assert "Traceback" not in web.output
