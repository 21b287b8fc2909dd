"""Marked keys and notes are found only in their own places after every fault of a provider."""

from __future__ import annotations

import base64
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import insert, update
from sqlalchemy.orm import Session

from aijobs import cli
from aijobs.ai.providers.openai_compatible import client, refusals
from aijobs.credentials.models import UserModelCredential
from aijobs.definitions.projector import ProjectionResult
from aijobs.errors import ApiError
from aijobs.job_types import flashcard_generation
from aijobs.learning.models import Flashcard
from aijobs.testing.fakellm import Answer, Step, faults
from tests.integration.ai.test_faults import NOT_AN_END, QUICKER
from tests.integration.canaries.canaries import (
    MARKS,
    NOTES,
    PLATFORM_KEY,
    SERVICE_TOKEN,
    USER_KEY,
    Mark,
    Site,
    Trace,
    find_leaks,
    open_site,
    recorded_warnings,
)
from tests.integration.canaries.echoes import ECHOES
from tests.support.databases import SqliteDatabases
from tests.support.processes import Run
from tests.support.servers import ValkeyServer
from tests.web.console.stage import prepare

FAULTS = sorted(set(faults.FAULTS) - NOT_AN_END)
LATER = frozenset(
    "status-302 status-402 status-403 status-404 status-408 status-413 status-422 status-501 status-503 status-529 "
    "status-299 error-as-list message-as-object whole-without-choices odd-choices odd-reason-object number cut-off "
    "lists-for-texts texts-for-lists twice-the-same-name".split()
)
"""Echoes that are similar to others; only the long run tests them."""
FAULTS_WITH_TEXT = frozenset(
    "key-echo 401 402 429-quota 500 502 404 content-exists-risk context-openai no-json-schema html wrong-shape prose "
    "nan content-filter refusal error-event reset-mid-body truncated-valid other-model negative-usage".split()
)
"""Faults that contain text of the server. Only the long run tests the others, which hang, are slow or cut off."""
QUICK = [name for name in ECHOES if name not in LATER]
KEYS = [mark for text, mark in MARKS.items() if "CANARY" in text and not text.startswith("CANARY")]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def shared_site(sqlite: SqliteDatabases, valkey: ValkeyServer, run: Run) -> Iterator[Site]:
    valkey.ensure_running()
    url = sqlite.create_database(prepare)
    with open_site(url, valkey.url, run.new_folder("canaries")) as site:
        yield site
    sqlite.drop_database(url)


@pytest.fixture
def site(shared_site: Site, redis_url: str) -> Iterator[Site]:
    shared_site.forget()
    with recorded_warnings(shared_site):
        yield shared_site


def output_of(capfd: Capture) -> str:
    return "".join(capfd.readouterr())


def both(site: Site, step: Step) -> None:
    """Run a job on the platform's key and one on the user's own key."""
    site.run(step)
    site.run(own_key=True)
    assert {call.key for call in site.llm.calls} == {PLATFORM_KEY, USER_KEY}


# --- faults of providers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n if n in FAULTS_WITH_TEXT else pytest.param(n, marks=pytest.mark.long) for n in FAULTS]
)
def test_provider_fault_leaks_neither_key_nor_notes(site: Site, name: str, capfd: Capture) -> None:
    both(site, faults.build(name, QUICKER.get(name)))
    assert site.leaks(output_of(capfd)) == []


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in ECHOES])
def test_key_and_notes_in_a_provider_answer_are_not_leaked(site: Site, name: str, capfd: Capture) -> None:
    both(site, ECHOES[name])
    assert site.leaks(output_of(capfd)) == []


def test_lists_contain_neither_key_nor_notes(site: Site, capfd: Capture) -> None:
    for step in (faults.answer(), faults.key_echo(), ECHOES["model-is-the-key"], ECHOES["status-429"]):
        both(site, step)
    assert any("aijobs:breaker:acme" in line for line in site.seen_in_redis)
    assert any("aijobs:calls:acme" in line for line in site.seen_in_redis)
    assert site.leaks(output_of(capfd), *site.lists()) == []


# --- internal faults -----------------------------------------------------------------------------------------------


class Projecting:
    """A projector that calls a function of the test."""

    def __init__(self, key: str, project: Callable[[Session, Any, Any], None]) -> None:
        self.key, self._project = key, project

    def project(self, session: Session, job: Any, validated_output: Any) -> ProjectionResult:
        self._project(session, job, validated_output)
        return ProjectionResult([])


def projected_by(site: Site, name: str, project: Callable[[Session, Any, Any], None]) -> str:
    """Register a job type like flashcards with its own projector."""
    site.services.registry.register_projector(Projecting(name, project))
    definition = flashcard_generation.DEFINITION
    once = replace(definition.execution, max_retries=0)
    site.services.registry.register(replace(definition, job_type=name, projector=name, execution=once))
    return name


def test_exception_that_quotes_the_output_is_only_in_the_internal_message(site: Site, capfd: Capture) -> None:
    """The author of a job type decides the text of its exceptions; recognised secrets in it are masked."""

    def explode(session: Session, job: Any, output: Mapping[str, Any]) -> None:
        raise ValueError(f"can't project {output}") from RuntimeError(f"{output} and sk-proj-0123456789ABCDEF")

    job = site.run(faults.answer(), job_type=projected_by(site, "quoting", explode))
    assert (job.error_code, job.public_error_message is not None) == ("INTERNAL_PROJECTION", True)
    found = [leak.partition(": …")[0] for leak in site.leaks(output_of(capfd))]
    assert set(found) == {
        f"{NOTES} in {place}"
        for place in (
            "ai_jobs.internal_error_message",
            "an internal message",
            f"/admin-api/ai/jobs/{job.id}",
            f"/console/jobs/{job.id}",
        )
    }
    assert "sk-proj-0123456789ABCDEF" not in "".join(site.messages)
    site.console.get("/console/logout")
    for role in ("operator", "viewer"):
        console = type(site.console)(site.console.http.application.test_client())
        assert console.sign_in(role).status_code == 303
        pages = [Trace(role, path, console.get(path).text) for path in (f"/console/jobs/{job.id}", "/console/jobs")]
        assert "INTERNAL_PROJECTION" in pages[0].text
        assert find_leaks(pages, [Mark(NOTES)]) == []


def test_failed_statement_is_recorded_without_its_parameters(site: Site, capfd: Capture) -> None:
    def break_a_rule(session: Session, job: Any, output: Any) -> None:
        session.execute(insert(Flashcard).values(id="1", job_id=job.id, front=f"{NOTES} {output}", tags=[output]))

    job = site.run(faults.answer(), job_type=projected_by(site, "breaking", break_a_rule))
    assert job.error_code == "INTERNAL_PROJECTION"
    assert "IntegrityError" in site.messages[-1]
    assert site.leaks(output_of(capfd)) == []


def test_unprintable_error_is_recorded_by_its_class(
    site: Site, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError(f"{PLATFORM_KEY} {USER_KEY} {NOTES}")

    async def explode(*_: Any) -> None:
        raise Unprintable(f"{PLATFORM_KEY} {USER_KEY} {NOTES}")

    monkeypatch.setattr(client.ServerClient, "converse", explode)
    for own_key in (False, True):
        job = site.run(own_key=own_key)
        assert job.error_code == "PROVIDER_STREAM_BROKEN"
        assert "Unprintable" in site.messages[-1]
    assert site.leaks(output_of(capfd)) == []


@pytest.mark.parametrize("changed", [{"ciphertext": USER_KEY.encode() * 3}, {"key_id": "gone"}])
def test_unreadable_key_is_named_by_its_id(site: Site, changed: dict[str, Any], capfd: Capture) -> None:
    job_id = site.new(own_key=True)
    with site.services.database.transaction() as session:
        session.execute(update(UserModelCredential).values(**changed))
    job = site.run_to_end(job_id)
    assert job.error_code == "CREDENTIAL_UNREADABLE"
    with pytest.raises(ApiError, match="CREDENTIAL_UNREADABLE"):
        site.services.credentials.resolve(str(job.credential_id))
    answer = resolve(site, str(job.credential_id))
    assert answer.status_code >= 400
    planted = "user_model_credentials.ciphertext"
    page = Trace("user", "resolve", answer.get_data(as_text=True))
    assert [leak for leak in site.leaks(output_of(capfd), page) if planted not in leak] == []


def resolve(site: Site, credential_id: str, token: str = SERVICE_TOKEN) -> Any:
    path = f"/internal/credentials/{credential_id}/resolve"
    return site.console.http.post(path, headers={"Authorization": f"Bearer {token}"})


def test_key_for_a_service_is_only_in_the_answer_to_it(site: Site, capfd: Capture) -> None:
    job = site.run(faults.answer(), own_key=True)
    answer = resolve(site, str(job.credential_id))
    assert (answer.status_code, answer.json["apiKey"]) == (200, USER_KEY)
    refused = resolve(site, str(job.credential_id), f"{SERVICE_TOKEN}x")
    assert refused.status_code == 401
    page = Trace("user", "a refusal", refused.get_data(as_text=True) + str(refused.headers))
    assert site.leaks(output_of(capfd), page, *site.lists()) == []


# --- commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def aijobs(site: Site, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trace]:
    """Return a function that runs a command, `aijobs("job", ID)`, and returns its output as an operator's page."""
    settings = site.services.settings
    for name, value in {
        "INSTANCE_PATH": settings.instance_path,
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "PROVIDERS": settings.providers,
        "ACME_API_KEY": PLATFORM_KEY,
    }.items():
        monkeypatch.setenv(f"AIJOBS_{name}", str(value))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)

    def run(*arguments: str) -> Trace:
        output_of(capfd)
        cli.run(list(arguments))
        return Trace("operator", f"aijobs {' '.join(arguments)}", output_of(capfd))

    return run


@pytest.mark.parametrize("name", ["key-echo", "status-500", "unknown-names", "model-is-the-key"])
def test_internal_message_on_the_command_line_contains_neither_key_nor_notes(
    site: Site, aijobs: Callable[..., Trace], name: str
) -> None:
    both(site, ECHOES.get(name) or faults.build(name))
    for job_id in site.jobs:
        outputs = [aijobs("job", job_id, "--internal"), aijobs("job", job_id, "--internal", "--json")]
        assert job_id in outputs[0].text
        assert find_leaks(outputs) == []


def test_provider_check_does_not_repeat_the_key(site: Site, aijobs: Callable[..., Trace]) -> None:
    for name in QUICK:
        site.llm.script(ECHOES[name])
        output = aijobs("providers", "check", "--json")
        trials, _ = json.JSONDecoder().raw_decode(output.text)
        assert [trial["provider"] for trial in trials["trials"]] == ["acme"]
        assert find_leaks([output]) == [], name
    site.llm.script(ECHOES["status-401"])
    assert find_leaks([aijobs("providers", "check")]) == []


# --- the search itself ---------------------------------------------------------------------------------------------


def test_search_finds_an_internal_message_that_quotes_a_server(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "is_word", lambda text: True)
    both(site, ECHOES["status-400"])
    found = {leak.partition(": …")[0] for leak in site.leaks()}
    for mark, job_id in ((PLATFORM_KEY, site.jobs[0]), (USER_KEY, site.jobs[1]), (NOTES, site.jobs[0])):
        for place in ("ai_jobs.internal_error_message", f"/console/jobs/{job_id}", f"/admin-api/ai/jobs/{job_id}"):
            assert f"{mark} in {place}" in found


def test_search_finds_marks_in_log_warnings_redis_and_columns(site: Site) -> None:
    job = site.run(faults.answer())
    assert site.leaks() == []
    logging.getLogger("httpx2").warning("a line with %s", USER_KEY)
    warnings.warn(f"a warning with {NOTES}", stacklevel=1)
    site.redis.set("planted", PLATFORM_KEY)
    with site.services.database.transaction() as session:
        session.execute(update(Flashcard).where(Flashcard.job_id == job.id).values(source_id=f"x{USER_KEY}"))
    found = "\n".join(site.leaks("printed: PLATFORM+CANARY"))
    for place in ("log", "a warning", "Redis", "flashcards.source_id", "stdout and stderr"):
        assert f" in {place}: " in found


@pytest.mark.parametrize("before", ["", "x", "xy", "xyz"])
def test_search_finds_a_mark_in_base64_and_in_urls(before: str) -> None:
    raw = f"{before}{PLATFORM_KEY}and more".encode()
    for spelled in (base64.b64encode(raw), base64.urlsafe_b64encode(raw), quote(raw.decode(), safe="").encode()):
        assert find_leaks([Trace("log", "log", spelled.decode())], KEYS)
    assert not find_leaks([Trace("log", "log", base64.b64encode(b"no mark in this long text").decode())], KEYS)


def test_every_fault_is_tested_and_a_good_answer_creates_cards(site: Site) -> None:
    assert set(FAULTS) == set(faults.FAULTS) - NOT_AN_END
    assert set(ECHOES) > LATER
    assert site.run(Answer()).artifact_count >= 1
    columns = {trace.place for trace in site.traces() if NOTES in trace.text and trace.kind == "column"}
    assert {"ai_job_snapshots.content", "ai_jobs.validated_output", "flashcards.source_title"} <= columns
