"""The example of `docs/adding-a-job-type.md` is extracted from the page, installed, and creates key terms."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aijobs.cli.dev_llm import providers_file
from aijobs.definitions import discovery
from aijobs.settings import KeyRing, Settings
from aijobs.testing.fakellm import Answer, FakeLlm
from aijobs.testing.memory_broker import MemoryBroker
from aijobs.wiring.services import Services, build_services
from tests.contracts import documents
from tests.contracts import job_type_rules as rules
from tests.contracts.job_type_rules import JobTypeSample
from tests.support.gateways import health
from tests.support.polling import poll
from tests.support.ports import free_port
from tests.support.processes import Processes, Run
from tests.support.rows import build_job, prepare_database

MODULE = "key_terms.job_type"
AIJOBS = Path(sys.executable).with_name("aijobs")
NOTES = {
    "en": ("Osmosis is the movement of water across a membrane.", "Osmosis", "The movement of water."),
    "zh": ("渗透作用是水分子通过半透膜的扩散。", "渗透作用", "水分子通过半透膜的扩散"),
}
"""The notes in each language, and one of their terms with its meaning."""


@pytest.fixture(scope="module")
def package(run: Run) -> Path:
    """Install the example with pip into a folder of its own, and return that folder."""
    source, target = run.new_folder("key-terms"), run.new_folder("installed")
    (source / "key_terms").mkdir()
    (source / "key_terms" / "__init__.py").touch()
    for block in documents.blocks(documents.read("docs/adding-a-job-type.md")):
        if block.title is not None:
            path = source / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    done = subprocess.run(
        [*command, "--no-build-isolation", "--target", target, source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_page_lists_the_files_that_it_shows() -> None:
    page = documents.read("docs/adding-a-job-type.md")
    (tree,) = (block.text for block in documents.blocks(page) if block.text.startswith("key-terms/\n"))
    listed = {line.split()[0] for line in tree.splitlines()[1:]}
    assert listed == {block.title for block in documents.blocks(page) if block.title} | {"key_terms/__init__.py"}


@pytest.fixture
def example(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example in this process: importable, and found by its entry point."""
    monkeypatch.syspath_prepend(package)
    (installed,) = distributions(path=[str(package)])
    monkeypatch.setattr(discovery, "entry_points", installed.entry_points.select)
    yield importlib.import_module(MODULE)
    for name in [name for name in sys.modules if name.partition(".")[0] == "key_terms"]:
        sys.modules.pop(name)


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


def test_example_is_registered_and_obeys_every_rule(example: ModuleType, services: Services) -> None:
    sample = JobTypeSample(services.registry.get("key_terms"), example)
    rules.check_labels(sample)
    rules.check_samples(sample)
    rules.check_junk(sample)
    rules.check_prompt(sample, services.prompts)
    rules.check_codes(inspect.getsource(example))
    projector = services.registry.projector(str(sample.definition.projector))
    with services.database.transaction() as session:
        rules.check_projector(sample, projector, session, build_job(job_type="key_terms"))


class Client:
    """The user's API of the running `aijobs up`."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self._token = url, token

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Return status and JSON of an answer."""
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refusal:
            return refusal.code, json.loads(refusal.read())


def notes(lang: str) -> dict[str, Any]:
    text = NOTES[lang][0]
    return {"lang": lang, "source": {"id": lang, "title": lang}, "segments": [{"sid": "p1", "text": text}]}


def answer_of(request: Any) -> Answer:
    """Answer like a model: one term, in the language of the notes."""
    quote, term, meaning = NOTES["zh" if "渗透" in str(request.body) else "en"]
    return Answer(json.dumps({"terms": [{"term": term, "meaning": meaning, "sid": "p1", "quote": quote}]}))


@pytest.fixture
def learner(package: Path, processes: Processes, run: Run) -> Iterator[Client]:
    """A user of an `aijobs up` with the example and a model."""
    instance = run.new_folder("example")
    with FakeLlm(on_request=answer_of) as llm:
        (instance / "providers.toml").write_text(providers_file(llm.url))
        env = {
            "AIJOBS_INSTANCE_PATH": str(instance),
            "AIJOBS_PORT": str(free_port()),
            "AIJOBS_PROVIDERS": str(instance / "providers.toml"),
            "PYTHONPATH": str(package),
        }
        up = processes.spawn([AIJOBS, "up"], env=env, name="up")
        up.wait_for_output("aijobs is up", timeout=60)
        url = re.search(r"http://127\.0\.0\.1:\d+", up.output)
        token = re.search(r"User token  (\S+)", up.output)
        assert url
        assert token
        yield Client(url[0], token[1])
        assert up.stop(timeout=60) == 0


@pytest.mark.timeout(240)
def test_installed_example_creates_terms_for_a_learner(learner: Client) -> None:
    for lang, (quote, term, meaning) in NOTES.items():
        status, job = learner.ask("/api/learning/key-terms", notes(lang))
        assert status == 202, job
        address = f"/api/learning/key-terms?jobId={job['jobId']}"
        poll(lambda address=address: learner.ask(address)[1]["lifecycleStatus"] == "succeeded", timeout=60)
        _, answer = learner.ask(address)
        evidence = [{"sid": "p1", "quote": quote}]
        assert answer["terms"] == [{"term": term, "meaning": meaning, "lang": lang, "evidence": evidence}]

    assert learner.ask("/api/learning/key-terms")[0] == 422
    assert learner.ask("/api/learning/key-terms?jobId=nothing")[1]["error"]["code"] == "JOB_NOT_FOUND"
    assert learner.ask("/api/learning/key-terms", {"lang": "fr"})[1]["error"]["code"] == "INPUT_INVALID"
    stranger = Client(learner.url, "")
    assert stranger.ask("/api/learning/key-terms", notes("en"))[0] == 401
