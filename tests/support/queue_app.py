"""Queues for `huey_consumer` in the tests of the consumer, with a crew that writes a diary.

`QUEUE_APP_DIARY` is the path of the diary. The job type says what a job does: `quick`, `slow` (waits for the file `go`
beside the diary), `raises`, `abandons` (calls `abandon` and runs on), `forks` (terminates a forked child that would
sleep for a minute). `QUEUE_APP_SCHEMA=old` makes the crew refuse to start.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from aijobs.errors import SettingsError
from aijobs.queues.crew import Crew, Pass
from aijobs.queues.hueys import AiJobsHuey
from aijobs.queues.message import JobMessage


def note(text: str) -> None:
    """Append a line to the diary."""
    with Path(os.environ["QUEUE_APP_DIARY"]).open("a") as diary:
        diary.write(f"{text}\n")


def sleep(says: Connection) -> None:
    """Report that the forked child runs, then sleep."""
    says.send("runs")
    time.sleep(60)


class Register:
    """The active jobs of this process, in place of an engine."""

    def __init__(self, queue: AiJobsHuey) -> None:
        self._queue = queue
        self._changed = threading.Condition()
        self._active: list[str] = []

    def run_job(self, message: JobMessage) -> None:
        with self._changed:
            self._active.append(message.job_id)
        note(f"begins {message.job_id}")
        self._do(message.job_type)
        note(f"ends {message.job_id}")
        with self._changed:
            self._active.remove(message.job_id)
            self._changed.notify_all()

    def drain(self, grace_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._active, grace_s)
            for job_id in self._active:
                note(f"released {job_id}")
        note("drained")

    def _do(self, job_type: str) -> None:
        if job_type == "forks":
            runs, says = multiprocessing.Pipe(duplex=False)
            child = multiprocessing.get_context("fork").Process(target=sleep, args=(says,))
            child.start()
            runs.recv()
            child.terminate()
            child.join(10)
            note(f"child ended with {child.exitcode}")
            child.kill()
        if job_type == "raises":
            raise ValueError("canary-of-content")
        if job_type == "abandons":
            self._queue.abandon()
        if job_type in ("slow", "abandons"):
            go = Path(os.environ["QUEUE_APP_DIARY"]).with_name("go")
            while not go.exists():
                time.sleep(0.01)


def build_jobs(queue: AiJobsHuey) -> Crew:
    """Return the crew of a job queue."""
    if os.environ.get("QUEUE_APP_SCHEMA") == "old":
        raise SettingsError("the schema is old: run `aijobs db upgrade`")
    register = Register(queue)

    def breaks() -> None:
        raise ValueError("canary-of-content")

    return Crew(
        run_job=register.run_job,
        start=lambda: note("crew started"),
        catch_up=[breaks, lambda: Path(os.environ["QUEUE_APP_DIARY"]).with_name("caught-up").touch()],
        drain=register.drain,
    )


def build_passes(queue: AiJobsHuey) -> Crew:
    """Return the crew of the maintenance queue: a quick pass and a broken one."""

    def breaks() -> None:
        note("broken pass")
        raise ValueError("canary-of-content")

    return Crew(
        passes=[Pass("quick", 1, lambda: note("quick pass")), Pass("broken", 1, breaks)],
        drain=lambda grace_s: note("drained"),
    )


interactive = AiJobsHuey("ai-interactive", build_jobs)
interactive.add_job_task()

maintenance = AiJobsHuey("ai-maintenance", build_passes)
for name in ("quick", "broken"):
    maintenance.add_pass(name)
