"""An engine over a kit's services, with the scripts and the provider of a test.

`stage.scripted(script)` and `stage.asking(*answers)` register temporary job types. `stage.run(job_id)` delivers the
job's message; `stage.run_to_end(job_id)` repeats that and advances the frozen clock to each next attempt.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from aijobs.ai.billing.usage import UsageLog
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.provider import CancellationToken, GenerateAnswer, GenerateRequest, Moderator, Route
from aijobs.db.clock import ManualClock
from aijobs.definitions.definition import JobDefinition, RetryBackoff, Script
from aijobs.definitions.projector import ProjectionResult, ResultProjector
from aijobs.engine.active_runs import ActiveRuns
from aijobs.engine.attempts import Attempts
from aijobs.engine.end_writes import EndWrites
from aijobs.engine.ending import Ending
from aijobs.engine.engine import ExecutionEngine
from aijobs.engine.execute import Execute
from aijobs.engine.prepare import Prepare
from aijobs.engine.project import Project
from aijobs.engine.resolve import Resolve
from aijobs.engine.watcher import Watcher
from aijobs.job_types import flashcard_generation, synthetic
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput
from aijobs.jobs.status import FINAL
from aijobs.learning.models import Flashcard
from aijobs.queues.message import JobMessage
from aijobs.upkeep.dispatcher import hand_over
from aijobs.wiring.providers import build_guard
from tests.support.gateways import gateway_to
from tests.support.jobs import BEGIN, Kit
from tests.support.polling import poll

CARDS = flashcard_generation.SAMPLE_OUTPUT
"""An answer that passes every check for `NOTES`."""
NOTES = flashcard_generation.SAMPLE_INPUT

Answer = str | Exception | Mapping[str, Any] | Callable[[GenerateRequest, CancellationToken], str]


@dataclass
class ScriptedProvider:
    """An `AiProvider` that gives the answers in order; the last one is used again.

    An answer is a text, a mapping (sent as JSON), an exception to raise, or a function (request, token) that returns
    a text.
    """

    answers: list[Answer]
    name: str = "local"
    requests: list[GenerateRequest] = field(default_factory=list)
    counts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the answer besides its text."""

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        self.requests.append(request)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer(request, token)
        text = answer if isinstance(answer, str) else json.dumps(answer)
        values: dict[str, Any] = {
            "model": "local-extractive-v1",
            "prompt_tokens": 100,
            "completion_tokens": 50,
            "cached_tokens": 10,
            "estimated": False,
            "finish_reason": "stop",
        }
        return GenerateAnswer(text=text, provider=self.name, **{**values, **self.counts})


class RecordingPresence:
    """A presence that records its calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def started(self, job_id: str) -> None:
        self.seen.append(("started", job_id))

    def finished(self, job_id: str) -> None:
        self.seen.append(("finished", job_id))


@dataclass
class Stage:
    """The engine of one worker process, with shortcuts for tests."""

    kit: Kit
    provider: ScriptedProvider
    engine: ExecutionEngine
    active: ActiveRuns
    presence: RecordingPresence
    watcher: Watcher
    abandoned: threading.Event
    names: Iterator[int]

    # --- temporary job types -----------------------------------------------------------------------------------

    def define(self, definition: JobDefinition, **execution: Any) -> str:
        """Register `definition` under a new job type and return that. `execution` changes limits; `delay` is in ms."""
        job_type = f"{definition.job_type}_{next(self.names)}"
        if "delay" in execution:
            execution["retry_backoff"] = RetryBackoff(execution.pop("delay"))
        changed = replace(definition, job_type=job_type, execution=replace(definition.execution, **execution))
        self.kit.services.registry.register(changed)
        return job_type

    def scripted(self, script: Script, *, projector: ResultProjector | None = None, **execution: Any) -> str:
        """Register a job type that runs `script`, optionally with its own projector."""
        key = synthetic.DEFINITION.projector
        if projector is not None:
            self.kit.services.registry.register_projector(projector)
            key = projector.key
        return self.define(replace(synthetic.DEFINITION, script=script, projector=key), **execution)

    def asking(self, *answers: Answer, projector: ResultProjector | None = None, **execution: Any) -> str:
        """Register a job type like flashcards, whose provider gives these answers in order."""
        self.provider.answers[:] = answers
        key = flashcard_generation.DEFINITION.projector
        if projector is not None:
            self.kit.services.registry.register_projector(projector)
            key = projector.key
        return self.define(replace(flashcard_generation.DEFINITION, projector=key), **execution)

    def new_cards(self, job_type: str) -> str:
        """Create a job over `NOTES`, of a type that `asking` registered, and return its id."""
        request = CreateJobInput("u1", job_type, "note", "note-1", NOTES)
        return self.kit.jobs.create_job(request).job.id

    # --- running -----------------------------------------------------------------------------------------------

    def message(self, job_id: str) -> JobMessage:
        """Return the job's message."""
        job = self.kit.job(job_id)
        with self.kit.database.read() as session:
            event = self.kit.services.outbox_events.enqueue_event(session, job)
        event_id = event.id if event else None
        return JobMessage(job.id, job.job_type, "0" * 64, "2026-03-01T08:00:00.000000Z", event_id)

    def run(self, job_id: str) -> str:
        """Deliver the job's message once and return the outcome."""
        return self.engine.execute(self.message(job_id))

    def run_to_end(self, job_id: str) -> AiJob:
        """Deliver the job's message until the job is final, and advance the clock to each next attempt."""
        for _ in range(30):
            self.run(job_id)
            job = self.kit.job(job_id)
            if job.lifecycle_status in FINAL:
                return job
            assert job.next_attempt_at is not None, "the attempt left the job held"
            assert isinstance(self.kit.clock, ManualClock)
            self.kit.clock.at = max(self.kit.clock.at, job.next_attempt_at)
        raise AssertionError("the job did not end within 30 attempts")

    def start(self, job_id: str) -> Delivery:
        """Deliver the job's message in a thread, as a worker does."""
        return Delivery(self, job_id)

    def usage(self, job_id: str) -> list[dict[str, Any]]:
        """Return the job's usage rows in the order of calls."""
        rows = self.kit.rows("ai_usage_logs", job_id=job_id)
        return sorted(rows, key=lambda row: (row["attempt_no"], row["call_no"]))


class Delivery:
    """A message that a worker's thread is processing."""

    def __init__(self, stage: Stage, job_id: str) -> None:
        self.outcome: str | None = None
        message = stage.message(job_id)

        def work() -> None:
            self.outcome = stage.engine.execute(message)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Return whether the worker's slot is free again."""
        return not self._thread.is_alive()

    def wait(self, timeout: float = 10) -> str:
        """Wait until the slot is free and return the outcome."""
        self._thread.join(timeout)
        assert self.outcome is not None, "the slot is not free"
        return self.outcome


@contextmanager
def open_stage(
    kit: Kit,
    *,
    gateway: AiGateway | None = None,
    router: ModelRouter | None = None,
    moderator: Moderator | None = None,
    **watching: Any,
) -> Iterator[Stage]:
    """Open a stage over the kit's services with a running watcher; `watching` are the watcher's times in seconds.

    `gateway` and `router` replace those of the scripted provider.
    """
    provider, presence, abandoned = ScriptedProvider([CARDS]), RecordingPresence(), threading.Event()
    services, usage = kit.services, UsageLog(kit.clock)
    seconds = {"heartbeat_s": 0.2, "watch_s": 0.1, "stuck_s": 30.0, **watching}
    database, clock, lifecycle = services.database, services.clock, services.lifecycle
    writes = EndWrites(database, clock, lifecycle, usage, patience=timedelta(hours=1), chance=lambda: 0.0)
    ending = Ending(lifecycle, writes)
    active = ActiveRuns(ending, presence)
    watcher = Watcher(database, lifecycle, services.broker, active, ending, abandon=abandoned.set, **seconds)
    engine = ExecutionEngine(
        Prepare(
            database,
            clock,
            services.registry,
            lifecycle,
            services.outbox_events,
            "host~boot~1~1~1~stage",
            put_back=hand_over(services.broker),
        ),
        Attempts(
            Resolve(
                database,
                services.prompts,
                router or ModelRouter({"d": (Route("local", "local-extractive-v1"),)}, "d"),
                services.credentials,
            ),
            Execute(
                database,
                lifecycle,
                gateway or gateway_to(provider),
                usage,
                services.costs,
                build_guard(services.settings),
                moderator,
            ),
            Project(database, lifecycle, services.registry),
            ending,
        ),
        active,
        watcher,
    )
    engine.start()
    try:
        yield Stage(kit, provider, engine, active, presence, watcher, abandoned, iter(range(1, 1000)))
    finally:
        engine.close()
        poll(lambda: not active.all(), what="every attempt's code returned")


class Held:
    """A script that runs until `go` is set and ignores its token."""

    def __init__(self, output: Mapping[str, Any] | None = None) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._output = output or {"output": {}, "artifacts": 1}

    def __call__(self, job_input: Mapping[str, Any], attempt_no: int, context: Any) -> dict[str, Any]:
        self.begun.set()
        assert self.go.wait(30), "`go` was not set"
        return dict(self._output)


@contextmanager
def failing_statement(kit: Kit, number: int, error: Callable[[], Exception]) -> Iterator[list[str]]:
    """Raise `error()` instead of the `number`-th statement (from 1) of the kit's engine in this block.

    Yields the list of all statements, including the failed one.
    """
    seen: list[str] = []

    def watch(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.append(statement)
        if len(seen) == number:
            raise error()

    event.listen(kit.database.engine, "before_cursor_execute", watch)
    try:
        yield seen
    finally:
        event.remove(kit.database.engine, "before_cursor_execute", watch)


def saved_job(stage: Stage, projector: Any = None) -> str:
    """Create a job whose output is saved, so that its next attempt begins with PROJECT."""
    job_id = stage.new_cards(stage.asking(CARDS, projector=projector))
    lease = stage.kit.lock(job_id)
    output = {
        "cards": [
            {**card, "evidence": [{**e, "start": 0, "end": 1} for e in card["evidence"]]} for card in CARDS["cards"]
        ],
        "dropped": [],
    }
    stage.kit.lifecycle.save_output(lease, output)
    stage.kit.lifecycle.release(lease)
    return job_id


def card_row(job_id: str, ordinal: int, text: str = "a card") -> Flashcard:
    """Build a business row of a job, without a projector."""
    return Flashcard(
        user_id="u1",
        job_id=job_id,
        ordinal=ordinal,
        card_type="basic",
        front=text,
        back="b",
        tags=[],
        difficulty="easy",
        evidence=[],
        lang="en",
        source_id="note-1",
        source_title="t",
        created_at=BEGIN,
    )


class Writing:
    """A projector that calls a function of the test and returns its artifacts."""

    key = "writing"

    def __init__(self, project: Any) -> None:
        self._project = project

    def project(self, session: Session, job: Any, validated_output: Any) -> ProjectionResult:
        result = self._project(session, job)
        return ProjectionResult(result if result is not None else [])
