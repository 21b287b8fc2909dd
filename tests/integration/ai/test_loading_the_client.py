"""A worker loads the client of providers before the time of an attempt begins, and only if it calls a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aijobs.ai.catalogue import Catalogue
from aijobs.ai.providers.openai_compatible import OpenAiCompatibleProvider
from aijobs.engine.engine import ExecutionEngine
from aijobs.engine.prepare import Prepare
from aijobs.engine.token import CancellationToken
from aijobs.ids import InstanceId
from aijobs.jobs.requests import CreateJobInput
from aijobs.learning.models import FLASHCARD_GENERATION
from aijobs.queues.message import JobMessage
from aijobs.testing.fakellm import FakeLlm
from aijobs.wiring import engine as engine_wiring
from aijobs.wiring.engine import build_engine
from aijobs.wiring.providers import build_servers
from tests.integration.engine.stage import NOTES, RecordingPresence
from tests.support.databases import SqliteDatabases
from tests.support.jobs import Kit, open_kit
from tests.support.messages import SECRET
from tests.support.processes import clean_environment
from tests.support.scratch import scratch_database

FIRST_CALL = """
import sys
from aijobs.ai.prompts import Prompt
from aijobs.ai.provider import GenerateRequest, Route
from aijobs.ai.providers.openai_compatible import LoopThread, OpenAiCompatibleProvider, load_client
from aijobs.engine.token import CancellationToken
from aijobs.testing.fakellm import Answer, FakeLlm
from tests.integration.ai.conftest import server_config

assert "openai" not in sys.modules, "loaded by who may never ask a server"
with FakeLlm() as llm:
    llm.script(Answer("{}"))
    provider = OpenAiCompatibleProvider(server_config(llm.url), LoopThread())
    load_client()
    before = set(sys.modules)
    request = GenerateRequest("t", Route("acme", "m1"), Prompt("s", "u"), {}, {})
    assert provider.generate(request, CancellationToken(60)).text == "{}"
    print(sorted(set(sys.modules) - before))
    provider.close()
"""


def test_first_call_imports_nothing_once_the_client_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL],
        cwd=Path(__file__).parents[3],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record in order each load of the client and each start of an attempt's time."""
    seen: list[str] = []

    class Token(CancellationToken):
        def __init__(self, *args: object, **named: object) -> None:
            seen.append("time begins")
            super().__init__(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("aijobs.engine.prepare.CancellationToken", Token)
    monkeypatch.setattr(engine_wiring, "load_client", lambda: seen.append("client is loaded"))
    return seen


@pytest.fixture
def run_cards(sqlite: SqliteDatabases, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """`run_cards(**settings)` runs a flashcard job in a worker with these settings and returns its outcome."""
    servers: list[OpenAiCompatibleProvider] = []

    def open_servers(catalogue: Catalogue) -> list[OpenAiCompatibleProvider]:
        servers.extend(build_servers(catalogue))
        return servers

    monkeypatch.setattr(engine_wiring, "build_servers", open_servers)

    def run(**settings: object) -> str:
        with open_kit(scratch_database(sqlite), **settings) as kit:
            engine = build_engine(kit.services, RecordingPresence(), InstanceId.current(), lambda: None)  # type: ignore[arg-type]
            return execute(kit, engine)

    yield run
    for server in servers:
        server.close()


def execute(kit: Kit, engine: ExecutionEngine) -> str:
    request = CreateJobInput("u1", FLASHCARD_GENERATION, "note", "note-1", NOTES)
    job = kit.jobs.create_job(request).job
    engine.start()
    try:
        return engine.execute(JobMessage(job.id, job.job_type, "0" * 64, "2026-03-01T08:00:00.000000Z"))
    finally:
        engine.close()


def test_worker_loads_the_client_before_the_time_of_an_attempt_begins(
    run_cards: Callable[..., str], loads: list[str], tmp_path: Path
) -> None:
    with FakeLlm() as llm:
        file = tmp_path / "providers.toml"
        file.write_text(
            f'[provider.acme]\nbase_url = "{llm.url}/v1"\nmodels = ["m1"]\nkey = "none"\n'
            '[routes]\ndefault = ["acme/m1"]\n'
        )

        assert run_cards(providers=str(file)) == "succeeded"

    assert loads[0] == "client is loaded"
    assert loads[-1] == "time begins"


def test_worker_without_remote_providers_does_not_load_the_client(
    run_cards: Callable[..., str], loads: list[str]
) -> None:
    assert run_cards() == "succeeded"

    assert loads == ["time begins"]


@pytest.mark.parametrize(("key", "loaded"), [({"DEEPSEEK_API_KEY": "sk-0123456789abcdef"}, "True"), ({}, "False")])
def test_child_process_loads_the_client_before_it_is_ready(tmp_path: Path, key: dict[str, str], loaded: str) -> None:
    build = "import sys; from aijobs.wiring.engine import build_child_runner; build_child_runner()"
    env = {
        "AIJOBS_INSTANCE_PATH": str(tmp_path),
        "AIJOBS_DATABASE_URL": f"sqlite:///{tmp_path}/jobs.db",
        "AIJOBS_REDIS_URL": "redis://127.0.0.1:1/0",
        "AIJOBS_MESSAGE_KEYS": f"k1:{SECRET}",
        **key,
    }
    done = subprocess.run(
        [sys.executable, "-c", f"{build}; print('openai' in sys.modules)"],
        cwd=Path(__file__).parents[3],
        env=clean_environment(env),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.stdout, done.returncode) == (f"{loaded}\n", 0), done.stderr


def test_job_on_a_users_own_key_also_loads_the_client_first(sqlite_kit: Kit) -> None:
    job, modes, services = sqlite_kit.new_job(), [], sqlite_kit.services
    sqlite_kit.set(job.id, credential_mode="user_deepseek_key")
    prepare = Prepare(
        services.database,
        services.clock,
        services.registry,
        services.lifecycle,
        services.outbox_events,
        "host~boot~1~1~1~x",
        put_back=lambda message: None,
        make_ready=lambda definition, mode: modes.append(mode),
    )
    assert prepare.take(JobMessage(job.id, job.job_type, "0" * 64, "2026-03-01T08:00:00.000000Z")) is not None
    assert modes == ["platform_key", "user_deepseek_key"]
