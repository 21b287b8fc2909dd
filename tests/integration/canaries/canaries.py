"""Canaries: jobs with marked content, and a search for the marks in everything that the system writes.

A site has the real wiring: Redis for queue, breaker and slots, a provider over a socket, a web application and a
console over the same database. It logs at DEBUG, including the client libraries, as an operator may set it.
"""

from __future__ import annotations

import base64
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import jwt
import pytest
import redis

from aijobs import logs
from aijobs.ai.catalogue import Catalogue
from aijobs.ai.providers.openai_compatible import OpenAiCompatibleProvider
from aijobs.clock import utc_now
from aijobs.db.clock import ManualClock
from aijobs.db.database import Base
from aijobs.definitions.definition import USER_DEEPSEEK_KEY
from aijobs.engine import end_writes
from aijobs.engine.engine import ExecutionEngine
from aijobs.engine.failure import internal_text
from aijobs.ids import InstanceId
from aijobs.job_types import flashcard_generation
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput, Overrides
from aijobs.jobs.status import FINAL
from aijobs.queues.message import JobMessage
from aijobs.queues.presence import Presence
from aijobs.settings import KeyRing, Settings
from aijobs.testing.fakellm import Call, FakeLlm, Step
from aijobs.web.factory import create_app
from aijobs.wiring.engine import build_engine
from aijobs.wiring.providers import build_servers
from aijobs.wiring.services import Services, build_services
from tests.web.console.stage import Console

PLATFORM_KEY = "PLATFORM+CANARY/0123.ab"
USER_KEY = "USERKEY+CANARY/4567.cd"
"""No pattern recognises these keys as secrets, and they are encoded differently in URLs."""
NOTES = "CANARYNOTES"
USER = "CANARYUSER"
IDEMPOTENCY = "CANARYIDEMPOTENCY"
SERVICE_TOKEN = "SERVICECANARY" + "t" * 32

MARKED_NOTES = {
    "lang": "en",
    "source": {"id": "note-1", "title": f"About {NOTES}"},
    "segments": [
        {
            "sid": "p1",
            "text": f"{NOTES} osmosis is the movement of water across a membrane. "
            f"A {NOTES} solute is a substance that is dissolved in a liquid.",
        }
    ],
}


@dataclass(frozen=True)
class Mark:
    """A text to search for, with the columns and kinds of pages that may contain it."""

    text: str
    columns: frozenset[str] = frozenset()
    pages: frozenset[str] = frozenset()

    @cached_property
    def spellings(self) -> tuple[str, ...]:
        """Return the text as it is, in URL encoding, and in base64 at each of the three possible offsets."""
        raw, encoded = self.text.encode(), []
        for before, skip in ((0, 0), (1, 2), (2, 3)):
            whole = (before + len(raw)) * 4 // 3  # Characters that don't depend on the following bytes.
            encoded.append(base64.b64encode(b"\0" * before + raw).decode()[skip:whole])
        safe = [text.translate(str.maketrans("+/", "-_")) for text in encoded]
        return tuple(dict.fromkeys([self.text, quote(self.text, safe=""), quote_plus(self.text), *encoded, *safe]))


MADE_OF_NOTES = {f"flashcards.{column}" for column in ("front", "back", "text", "hint", "tags", "evidence")}
MARKS = {
    NOTES: Mark(
        NOTES,
        frozenset({"ai_job_snapshots.content", "ai_jobs.validated_output", "flashcards.source_title", *MADE_OF_NOTES}),
    ),
    USER: Mark(
        USER,
        frozenset(
            {
                "ai_jobs.user_id",
                "ai_job_events.actor",
                "ai_usage_logs.user_id",
                "audit_logs.after",
                "flashcards.user_id",
                "outbox_events.dedupe_key",
                "quota_usage.user_id",
                "user_model_credentials.user_id",
            }
        ),
        frozenset({"operator"}),
    ),
    IDEMPOTENCY: Mark(
        IDEMPOTENCY, frozenset({"ai_jobs.idempotency_key", "outbox_events.dedupe_key"}), frozenset({"operator"})
    ),
    **{text: Mark(text) for text in (PLATFORM_KEY, USER_KEY, "PLATFORM+CANARY", "USERKEY+CANARY", SERVICE_TOKEN)},
}
"""The places that may contain each mark. No place may contain a key or a part of one."""


@dataclass(frozen=True)
class Trace:
    """A text that was found at a place. Kinds: `column`, `log`, `redis`, `user` and `operator` (pages), `message`,
    `output`.
    """

    kind: str
    place: str
    text: str


def read_redis(client: redis.Redis) -> list[str]:
    """Return a line for each key with its value."""
    readers: Mapping[Any, Callable[[bytes], Any]] = {
        b"none": lambda _: "(deleted meanwhile)",
        b"string": client.get,
        b"zset": lambda k: client.zrange(k, 0, -1, withscores=True),
        b"list": lambda k: client.lrange(k, 0, -1),
        b"set": client.smembers,
        b"hash": client.hgetall,
    }
    return [f"{key!r} = {readers[client.type(key)](key)!r}" for key in client.scan_iter(count=1000)]


@dataclass
class Site:
    """One installation, and everything that it has written since the last `forget`."""

    services: Services
    engine: ExecutionEngine
    llm: FakeLlm
    redis: redis.Redis
    console: Console
    log: io.StringIO
    clock: ManualClock
    job_type: str
    seen_in_redis: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    """The internal text of each error of an attempt, including retried ones."""
    warned: list[warnings.WarningMessage] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)

    # --- doing -------------------------------------------------------------------------------------------------

    def run(self, step: Step | None = None, *, own_key: bool = False, job_type: str | None = None) -> AiJob:
        """Create a job over the marked notes and run it to its end; `step` answers all its calls."""
        if step is not None:
            self.llm.script(step)
        return self.run_to_end(self.new(own_key=own_key, job_type=job_type))

    def new(self, *, own_key: bool = False, job_type: str | None = None) -> str:
        """Create a job; with `own_key`, it uses a marked key of the user."""
        overrides = Overrides()
        if own_key:
            credential = self.services.credentials.create(USER, USER_KEY)
            overrides = Overrides(credential_mode=USER_DEEPSEEK_KEY, credential_id=credential.id)
        key = f"{IDEMPOTENCY}-{len(self.jobs)}"
        request = CreateJobInput(USER, job_type or self.job_type, "note", "note-1", MARKED_NOTES, key, overrides)
        self.jobs.append(self.services.jobs.create_job(request).job.id)
        self.snapshot_redis()
        return self.jobs[-1]

    def run_to_end(self, job_id: str) -> AiJob:
        """Deliver the job's message until it is final, and advance the clock to each next attempt."""
        for _ in range(10):
            job = self.job(job_id)
            if job.lifecycle_status in FINAL:
                return job
            self.clock.at = max(self.clock.at, job.next_attempt_at or self.clock.at)
            self.engine.execute(JobMessage(job.id, job.job_type, "0" * 64, "2026-03-01T08:00:00.000000Z"))
        raise AssertionError("the job did not end within 10 attempts")

    def job(self, job_id: str) -> AiJob:
        with self.services.database.read() as session:
            return session.get_one(AiJob, job_id)

    def ask_as_user(self, path: str) -> Any:
        claims = {"sub": USER, "exp": utc_now().timestamp() + 600}
        token = jwt.encode(claims, self.services.settings.jwt_secret, "HS256")
        return self.console.http.get(path, headers={"Authorization": f"Bearer {token}"})

    def forget(self) -> None:
        """Empty every place, except operators and their sessions."""
        with self.services.database.transaction() as session:
            for table in reversed(Base.metadata.sorted_tables):
                if table.name not in ("operators", "operator_tokens", "operator_sessions"):
                    session.execute(table.delete())
        self.redis.flushdb()
        self.llm.forget()
        self.log.seek(0)
        self.log.truncate()
        for recorded in (self.seen_in_redis, self.messages, self.jobs):
            recorded.clear()

    # --- searching ---------------------------------------------------------------------------------------------

    def snapshot_redis(self) -> None:
        """Record every key with its current value."""
        self.seen_in_redis += read_redis(self.redis)

    def traces(self, output: str = "") -> list[Trace]:
        """Return everything that was written; `output` is the output of the process."""
        self.snapshot_redis()
        return [
            *self._columns(),
            *self._pages(),
            *(Trace("log", "log", line) for line in self.log.getvalue().splitlines()),
            *(Trace("redis", "Redis", line) for line in self.seen_in_redis),
            *(Trace("message", "an internal message", text) for text in self.messages),
            *(Trace("output", "a warning", str(each.message)) for each in self.warned),
            Trace("output", "stdout and stderr", output),
        ]

    def _columns(self) -> Iterator[Trace]:
        with self.services.database.engine.connect() as connection:
            for table in Base.metadata.sorted_tables:
                for row in connection.exec_driver_sql(f"SELECT * FROM {table.name}").mappings():
                    yield from (Trace("column", f"{table.name}.{c}", str(v)) for c, v in row.items() if v is not None)

    def _pages(self) -> Iterator[Trace]:
        for job_id in self.jobs:
            yield _page("user", f"/api/ai/jobs/{job_id}", self.ask_as_user(f"/api/ai/jobs/{job_id}"))
            for path in (f"/admin-api/ai/jobs/{job_id}", f"/console/jobs/{job_id}"):
                yield _page("operator", path, self.console.get(path))

    def lists(self) -> list[Trace]:
        """Return the pages with lists of jobs, calls and other rows."""
        paths = ("/admin-api/ai/jobs", "/admin-api/ai/usage", "/admin-api/ai/providers")
        pages = ("/console/jobs", "/console/providers", "/console/outbox", "/console/workers", "/console/audit")
        return [
            _page("user", "/api/ai/jobs", self.ask_as_user("/api/ai/jobs")),
            *(_page("operator", path, self.console.get(path)) for path in (*paths, *pages)),
        ]

    def leaks(self, output: str = "", *more: Trace) -> list[str]:
        """Return each forbidden occurrence of a mark, in all places of the site and in `more`."""
        return find_leaks([*self.traces(output), *more])


def find_leaks(traces: Iterable[Trace], marks: Iterable[Mark] = tuple(MARKS.values())) -> list[str]:
    """Return each forbidden occurrence of a mark, with its place."""
    found = set()
    for mark in marks:
        for trace in traces:
            if trace.place in mark.columns or trace.kind in mark.pages:
                continue
            at = next((trace.text.find(spelled) for spelled in mark.spellings if spelled in trace.text), None)
            if at is not None:
                found.add(f"{mark.text} in {trace.place}: …{trace.text[max(0, at - 120) : at + 60]}…")
    return sorted(found)


def _page(kind: str, path: str, answer: Any) -> Trace:
    assert answer.status_code == 200, (path, answer.status_code, answer.get_data(as_text=True)[:500])
    return Trace(kind, path, answer.get_data(as_text=True) + str(answer.headers))


@contextmanager
def open_site(database_url: str, redis_url: str, folder: Path, **settings: Any) -> Iterator[Site]:
    """Open a site over a migrated database with operators and an empty broker. The caller calls `forget`."""
    with ExitStack() as ends:
        ends.enter_context(pytest.MonkeyPatch.context()).setenv("OPENAI_LOG", "debug")
        patch = ends.enter_context(pytest.MonkeyPatch.context())
        log = ends.enter_context(_log_at_debug())
        sites: list[Site] = []
        llm = ends.enter_context(FakeLlm(on_end=lambda call: _snapshot_redis(sites, call)))
        values: dict[str, Any] = {
            "instance_path": folder,
            "database_url": database_url,
            "redis_url": redis_url,
            "secret_key": "s" * 32,
            "jwt_secret": "j" * 32,
            "message_keys": KeyRing((("k1", b"m" * 32),)),
            "credential_keys": KeyRing((("c1", b"c" * 32),)),
            "service_token": SERVICE_TOKEN,
            "user_active_jobs": 0,
            "breaker_failures": 50,
            "providers": str(_providers_file(folder, llm.url)),
            "provider_keys": {"acme": PLATFORM_KEY},
        }
        clock = ManualClock(utc_now())
        services = build_services(Settings(**{**values, **settings}), clock=clock)
        ends.callback(services.database.dispose)
        instance = InstanceId.current()
        servers: list[OpenAiCompatibleProvider] = []

        def open_servers(catalogue: Catalogue) -> list[OpenAiCompatibleProvider]:
            servers.extend(build_servers(catalogue))
            return servers

        patch.setattr("aijobs.wiring.engine.build_servers", open_servers)
        engine = build_engine(services, Presence(services.broker.client, instance, "ai-background"), instance, _stay)
        engine.start()
        ends.callback(lambda: _close(engine, servers))
        console = Console(create_app(services=services).test_client())
        assert console.sign_in("super_admin").status_code == 303
        definition = flashcard_generation.DEFINITION
        execution = replace(definition.execution, max_retries=1, timeout_ms=5_000)
        twice = replace(definition, job_type="canary_cards", execution=execution)
        services.registry.register(twice)
        client = redis.Redis.from_url(redis_url)
        ends.callback(client.close)
        site = Site(services, engine, llm, client, console, log, clock, twice.job_type)

        def note_message(error: BaseException) -> str:
            site.messages.append(internal_text(error))
            return site.messages[-1]

        patch.setattr(end_writes, "internal_text", note_message)
        sites.append(site)
        yield site


def _snapshot_redis(sites: list[Site], call: Call) -> None:
    """Record Redis at the end of each call, when its slot may still be in use."""
    for site in sites:
        site.snapshot_redis()


def _close(engine: ExecutionEngine, servers: Iterable[OpenAiCompatibleProvider]) -> None:
    engine.close()
    for server in servers:
        server.close()


def _stay() -> None:
    raise AssertionError("an attempt's code did not return")


def _providers_file(folder: Path, url: str) -> Path:
    path = folder / "providers.toml"
    path.write_text(
        f"""
        [provider.acme]
        base_url = "{url}/v1"
        models = ["m1"]
        max_concurrent_calls = 4
        prices_as = "deepseek"
        connect_s = 1
        [routes]
        default = ["acme/m1"]
        [user_routes]
        user_deepseek_key = ["acme/m1"]
        """
    )
    return path


@contextmanager
def _log_at_debug() -> Iterator[io.StringIO]:
    """Capture the whole log, at DEBUG, including the client libraries."""
    named = ["", "openai", "openai._base_client", "httpx2", "httpcore2", "huey", "asyncio"]
    loggers = [logging.getLogger(name) for name in named]
    levels, handlers, stream = [each.level for each in loggers], list(loggers[0].handlers), io.StringIO()
    logs.configure("DEBUG", stream=stream)
    for each in loggers:
        each.setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        loggers[0].handlers[:] = handlers
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


@contextmanager
def recorded_warnings(site: Site) -> Iterator[None]:
    """Record warnings instead of raising them, as in production."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        site.warned = caught
        yield
