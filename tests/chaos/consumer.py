"""`python -m tests.chaos.consumer aijobs.workers.QUEUE …`: Huey's consumer in a process with crash points.

`CHAOS_FOLDER` contains the armed crash points and the ledger, `CHAOS_NAME` is the name of the process.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from huey.bin.huey_consumer import consumer_main

from aijobs.ai.calling.breaker import CircuitBreaker
from aijobs.ai.provider import AiProvider, GenerateAnswer, GenerateRequest
from aijobs.ai.providers.openai_compatible import OpenAiCompatibleProvider
from aijobs.definitions import definition
from aijobs.engine import child
from aijobs.engine.execute import Execute
from aijobs.engine.run import Run
from aijobs.errors import JobError
from aijobs.learning.rules import MODEL, NAME, LocalProvider
from aijobs.queues.hueys import QueueStorage
from tests.chaos import chaos_job, child_worker, crashes, ledger
from tests.chaos.crashes import CrashPoints
from tests.chaos.faults import DROP_MARK, DROP_SHARE, DROPPED
from tests.chaos.provider import with_row

BACKOFF_SHARE = 4
"""Divides the queues' waits before a takeover, which fit leases of a minute; the leases here are shorter."""
PROBE_LEASE = timedelta(seconds=5)
"""How long a breaker waits for a probe whose worker died; in production four times as long."""


class Recorder:
    """Wraps the providers, records each call in the ledger, and answers the calls of the chaos type by their script."""

    def __init__(self, points: CrashPoints, path: Path) -> None:
        self._points, self._path = points, path
        self._at_work = threading.local()

    def remember(self, original: Callable[..., Any], execute: Execute, run: Run, resolved: Any) -> Any:
        """Wrap `Execute.execute`: remember the attempt of this thread's provider calls."""
        self._at_work.run = run
        return original(execute, run, resolved)

    def ask(self, original: Callable[..., Any], provider: AiProvider, request: GenerateRequest, token: Any) -> Any:
        """Wrap `generate` of a provider. A prompt for a server gets the id of its usage row, for the server's bill."""
        run: Run = self._at_work.run
        assert run.call is not None, "a provider was asked before the usage row was there"
        whose = {"usage": run.call.usage_id, "job": run.lease.job_id, "attempt": run.lease.attempt_no}
        self._points.reach("before_call")
        ledger.append(self._path, what=ledger.ASKED, provider=provider.name, **whose)
        if provider.name != NAME:
            marked = replace(request.prompt, user=with_row(request.prompt.user, run.call.usage_id))
            answer = original(provider, replace(request, prompt=marked), token)
        elif request.job_type == chaos_job.JOB_TYPE:
            answer = self._scripted(request.input, run.lease.attempt_no, token)
        else:
            answer = original(provider, request, token)
        ledger.append(self._path, what=ledger.ANSWERED, provider=provider.name, **whose)
        self._points.reach("after_answer")
        self._points.reach("between_answer_and_save")
        return answer

    def _scripted(self, job_input: Mapping[str, Any], attempt_no: int, token: Any) -> GenerateAnswer:
        calls = job_input["calls"]
        call = calls[min(attempt_no, len(calls)) - 1]
        token.sleep(call.get("sleep_ms", 0) / 1000)
        if call.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if call.get("raise"):
            raise JobError(call["raise"], "scripted by the job's input")
        return GenerateAnswer(
            text=chaos_job.answer(job_input, call),
            provider=NAME,
            model=MODEL,
            prompt_tokens=10,
            completion_tokens=10,
            cached_tokens=0,
            estimated=False,
            finish_reason="stop",
        )


def wait_less_for_a_probe(original: Callable[..., Any], breaker: CircuitBreaker, scope: str) -> Any:
    """Wrap `CircuitBreaker.admit`."""
    return original(breaker, scope, PROBE_LEASE)


def lose_messages(folder: Path) -> Callable[..., Any]:
    """Return a wrapper of `QueueStorage.dequeue` that loses some popped messages while the driver drops messages."""

    def dequeue(original: Callable[..., Any], storage: QueueStorage) -> bytes | None:
        data: bytes | None = original(storage)
        if data is not None and (folder / DROP_MARK).exists() and random.random() < DROP_SHARE:
            ledger.append(folder / DROPPED, what="dropped")
            return None
        return data

    return dequeue


def install_recorder(points: CrashPoints, folder: Path) -> None:
    """Record the provider calls of this process, and answer those of the chaos type."""
    recorder = Recorder(points, folder / "ledger")
    crashes.wrap(Execute, "execute", recorder.remember)
    crashes.wrap(LocalProvider, "generate", recorder.ask)
    crashes.wrap(OpenAiCompatibleProvider, "generate", recorder.ask)
    crashes.wrap(CircuitBreaker, "admit", wait_less_for_a_probe)


def main() -> None:
    """Install crash points and ledger in this process, then run the consumer."""
    folder, name = Path(os.environ["CHAOS_FOLDER"]), os.environ["CHAOS_NAME"]
    points = CrashPoints(folder, name)
    child.MODULE = child_worker.__name__
    queues: dict[str, Any] = dict(definition.QUEUES)
    for queue_name, policy in queues.items():
        shorter = replace(policy, backoff_ms=policy.backoff_ms // BACKOFF_SHARE)
        definition.QUEUES[queue_name] = shorter  # type: ignore[index]
    if any("maintenance" in argument for argument in sys.argv):
        crashes.install_commits(points, "maintenance")
        crashes.install_maintenance(points)
    else:
        install_recorder(points, folder)
        crashes.wrap(QueueStorage, "dequeue", lose_messages(folder))
        crashes.install_commits(points, "worker")
        crashes.install_worker(points)
    sys.exit(consumer_main())


if __name__ == "__main__":
    main()
