"""A job type whose input says how an attempt ends its process, loaded as a plug-in.

Input: `calls`, one entry per attempt; the last entry is used again for later attempts. Output: how the projector ends
the process. Artifact: the id is the pid of the process in which the job succeeded.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from aijobs.definitions import definition as d
from aijobs.definitions.projector import Artifact, ProjectedJob, ProjectionResult

JOB_TYPE = "deadly"


class Call(BaseModel):
    """The script of one attempt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sleep_ms: int = Field(0, ge=0, le=600_000)
    wait_for: str = ""
    """Path of a file; the attempt waits until it exists."""
    way: str = ""
    """How the attempt ends the process: `exit`, `segv`, `memory` or `leaves a fork`. `stuck`: the code never returns
    and blocks all other threads.

    The attempt succeeds with `later` (the process exits when the file `wait_for` is removed), `forks` (a forked
    process does so), `both return` (parent and forked child both return) and `cat` (reads the standard input). It
    sleeps 30 s with `removes` (removes that file) and `answers` (sends `answer` to the parent process).
    """
    answer: str = ""
    projector_way: str = ""
    """How the projector ends the process; as in `way`."""


class Input(BaseModel):
    """One `Call` per attempt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    calls: list[Call] = Field(min_length=1)


class Output(BaseModel):
    """How the projector ends its process."""

    model_config = ConfigDict(extra="forbid", strict=True)

    projector_way: str


def die(way: str) -> None:
    """End this process as the kernel, a broken library or a bad script would, or block it for ever."""
    if way == "exit":
        os._exit(3)
    if way == "leaves a fork" and os.fork():
        os._exit(3)
    if way == "leaves a fork":
        time.sleep(30)
    if way == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if way == "memory":  # The kernel's out-of-memory killer sends this signal.
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "stuck":
        re.match(r"(a+)+$", "a" * 64 + "b")


def answer(text: str) -> None:
    """Write a message into each Unix socket of this process: one of them leads to the parent process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family == socket.AF_UNIX:
                        Connection(found.detach()).send_bytes(text.encode())


def wait_and_exit(path: Path) -> None:
    """End this process when the file is removed, or after 30 s."""
    ends = time.monotonic() + 30
    while path.exists() and time.monotonic() < ends:
        time.sleep(0.02)
    os._exit(3)


def leave(call: Mapping[str, Any]) -> None:
    """Run the ways that let the attempt succeed or sleep."""
    way, path = call.get("way"), Path(call.get("wait_for", ""))
    if way == "later":
        threading.Thread(target=wait_and_exit, args=(path,), daemon=True).start()
    if way == "forks" and not os.fork():
        wait_and_exit(path)
    if way == "both return":
        os.fork()
    if way == "removes":
        path.unlink()
        time.sleep(30)
    if way == "cat":
        subprocess.run(["cat"], check=True)
    if way == "answers":
        answer(call["answer"])
        time.sleep(30)


def run(job_input: Mapping[str, Any], attempt_no: int, context: d.ScriptContext) -> dict[str, Any]:
    """Run the script of this attempt."""
    calls = job_input["calls"]
    call = calls[min(attempt_no, len(calls)) - 1]
    context.sleep(call.get("sleep_ms", 0) / 1000)
    while call.get("wait_for") and not Path(call["wait_for"]).exists():
        time.sleep(0.02)
    die(call.get("way", ""))
    leave(call)
    return {"projector_way": call.get("projector_way", "")}


class DeadlyProjector:
    """Records the pid as an artifact, or ends the process if the output says so."""

    key = JOB_TYPE

    def project(self, session: Session, job: ProjectedJob, validated_output: Mapping[str, Any]) -> ProjectionResult:
        """Return the artifact with this process's pid."""
        die(validated_output["projector_way"])
        return ProjectionResult([Artifact("Process", str(os.getpid()), 0)])


PROJECTOR = DeadlyProjector()

DEFINITION = d.JobDefinition(
    job_type=JOB_TYPE,
    metadata=d.Metadata(label="Deadly", description="Ends its process.", domain="maintenance", version="1"),
    queue=d.Queue("ai-interactive", 50),
    execution=d.Execution(
        timeout_ms=5_000, max_retries=0, retry_backoff=d.RetryBackoff(300), cancellable=True, abort_strategy="fail"
    ),
    input=d.Input("1", Input),
    output=d.Output("1", Output),
    projector=JOB_TYPE,
    script=run,
    production=False,
)
