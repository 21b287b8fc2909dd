"""The example of `docs/adding-a-job-type.md` is cut out of the page, installed as a plug-in, and run."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import select

from aijobs import wiring
from aijobs.ai.provider import GenerateAnswer, GenerateRequest
from aijobs.db.database import Database
from aijobs.definitions import discovery
from aijobs.ids import InstanceId
from aijobs.jobs.service import CreateJobInput
from aijobs.learning.models import Flashcard
from aijobs.queues.message import JobMessage
from aijobs.settings import KeyRing, Settings
from aijobs.testing.memory_broker import MemoryBroker
from aijobs.wiring import Services, build_engine, build_services
from tests.contracts import documents
from tests.contracts import job_type_rules as rules
from tests.contracts.job_type_rules import JobTypeSample
from tests.support.gateways import health
from tests.support.processes import Run
from tests.support.rows import build_job, prepare_database

NAME = "documented_key_terms"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example as an installed package would bring it: importable, and named by an entry point."""
    for block in documents.blocks(documents.read("docs/adding-a-job-type.md")):
        if block.title is not None:
            path = tmp_path / block.title.replace("key_terms.py", f"{NAME}.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("key_terms", NAME, discovery.ENTRY_POINT_GROUP)
    monkeypatch.setattr(discovery, "entry_points", lambda group: [point] if group == point.group else [])
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


@pytest.fixture
def services(example: ModuleType, create_sqlite_database: Callable[..., str], run: Run) -> Iterator[Services]:
    keys = KeyRing((("k1", b"m" * 32),))
    settings = Settings(
        instance_path=run.new_folder("docs"),
        database_url=create_sqlite_database(prepare_database),
        message_keys=keys,
    )
    broker: Any = MemoryBroker(keys)
    broker.client = None
    services = build_services(settings, broker=broker, **health())
    yield services
    services.database.dispose()


class Stub:
    """A provider that answers with the example's own sample."""

    name = "local"

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer
        self.asked: list[GenerateRequest] = []

    def generate(self, request: GenerateRequest, token: Any) -> GenerateAnswer:
        self.asked.append(request)
        return GenerateAnswer(json.dumps(self._answer), self.name, request.route.model, 1, 1, 0, True, "stop")


class Nobody:
    """Shows no one what the worker does."""

    def started(self, job_id: str) -> None:
        """Nothing."""

    def finished(self, job_id: str) -> None:
        """Nothing."""


def test_the_example_is_registered_and_obeys_every_rule(example: ModuleType, services: Services) -> None:
    sample = JobTypeSample(services.registry.get("key_terms"), example)
    rules.check_labels(sample)
    rules.check_samples(sample)
    rules.check_junk(sample)
    rules.check_prompt(sample, services.prompts)
    rules.check_codes(inspect.getsource(example))
    projector = services.registry.projector(str(sample.definition.projector))
    with services.database.transaction() as session:
        rules.check_projector(sample, projector, session, build_job(job_type="key_terms"))


def test_a_job_of_the_example_runs_and_leaves_its_cards(
    example: ModuleType, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = Stub(example.SAMPLE_OUTPUT)
    monkeypatch.setattr(wiring, "LocalProvider", lambda *_: provider)
    created = services.jobs.create_job(
        CreateJobInput("u1", "key-terms", "note", "note-1", input=example.SAMPLE_INPUT, idempotency_key="k")
    )
    broker: Any = services.broker
    message: JobMessage | None = broker.take("ai-background")
    assert message is not None
    engine = build_engine(services, Nobody(), InstanceId.current(), lambda: None)  # type: ignore[arg-type]
    assert engine.execute(message) == "succeeded"
    (request,) = provider.asked
    assert "Osmosis is the movement of water" in request.prompt.user
    assert _fronts(services.database, created.job.id) == ["Osmosis"]


def _fronts(database: Database, job_id: str) -> list[str | None]:
    with database.read() as session:
        return list(session.execute(select(Flashcard.front).where(Flashcard.job_id == job_id)).scalars())
