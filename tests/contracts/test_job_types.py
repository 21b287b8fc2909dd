"""Every job type in the tree obeys the same rules; a new one is tested without a change here."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator

import pytest

from aijobs import job_types
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.catalogue import DEFAULT, Catalogue
from aijobs.ai.prompts import PromptTemplates
from aijobs.db.database import Database
from aijobs.definitions.discovery import find_job_types, prompt_folders
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.errors import CODES
from aijobs.wiring.definitions import build_registry
from tests.contracts import job_type_rules as rules
from tests.contracts.job_type_rules import JobTypeSample
from tests.contracts.sources import modules
from tests.support.rows import build_job, prepare_database

NAMES = [found.name for found in pkgutil.iter_modules(job_types.__path__)]
PRIVATE = re.compile(r"\d+\.\d+\.\d+\.\d+|://|/\w+/|\\|Traceback|Error\b|Exception|\bsk-|\.py\b|localhost")
MODULES = find_job_types(job_types)
prompts = PromptTemplates(prompt_folders(MODULES))


def _sample(name: str) -> JobTypeSample:
    module = importlib.import_module(f"{job_types.__name__}.{name}")
    return JobTypeSample(module.DEFINITION, module)


CATALOGUE = Catalogue.load(None, {})
ROUTER = ModelRouter(CATALOGUE.routes, DEFAULT, CATALOGUE.user_routes)


@pytest.fixture(params=NAMES)
def sample(request: pytest.FixtureRequest) -> JobTypeSample:
    return _sample(request.param)


@pytest.fixture(scope="module")
def registry() -> JobDefinitionRegistry:
    return build_registry(prompts, MODULES, ROUTER, production=False)


@pytest.fixture
def database(create_sqlite_database: Callable[..., str]) -> Iterator[Database]:
    database = Database(create_sqlite_database(prepare_database))
    yield database
    database.dispose()


def test_each_module_registers_a_type_of_its_own_name(registry: JobDefinitionRegistry) -> None:
    found = {definition.job_type for definition in registry.get_all()}
    assert set(NAMES) <= found
    assert len(NAMES) >= 2


def test_job_type_has_labels_in_both_languages(sample: JobTypeSample) -> None:
    rules.check_labels(sample)


def test_sample_is_accepted_and_can_be_read_again(sample: JobTypeSample) -> None:
    rules.check_samples(sample)


def test_invalid_answers_are_refused(sample: JobTypeSample) -> None:
    rules.check_junk(sample)


def test_prompt_renders_with_faults_and_hostile_notes(sample: JobTypeSample) -> None:
    rules.check_prompt(sample, prompts)


def test_docstring_of_a_job_type_has_in_out_and_leaves(sample: JobTypeSample) -> None:
    text = inspect.getdoc(sample.module) or ""
    assert all(word in text for word in ("In:", "Out:", "Leaves:"))


def test_repeated_projection_gives_the_same_artifacts(
    sample: JobTypeSample, registry: JobDefinitionRegistry, database: Database
) -> None:
    if sample.definition.projector is None:
        assert not hasattr(sample.module, "PROJECTOR")
        return
    projector = registry.projector(sample.definition.projector)
    job = build_job(job_type=sample.definition.job_type)
    with database.transaction() as session:
        rules.check_projector(sample, projector, session, job)


def test_every_raised_code_is_known() -> None:
    unknown = []
    for module in modules():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            code = node.args[0].value
            if (name in ("JobError", "ApiError") or ast.unparse(node.func) == "JobErrorInfo.of") and code not in CODES:
                unknown.append(f"{module.at(node.lineno)}: {code}")
    assert not unknown


@pytest.mark.parametrize("code", sorted(CODES))
def test_public_message_contains_no_address_path_key_or_stack(code: str) -> None:
    entry = CODES[code]
    for text in (entry.en, entry.zh):
        assert text.strip()
        assert not re.search(
            r"\d+\.\d+\.\d+\.\d+|://|/\w+/|\\|Traceback|Error\b|Exception|\bsk-|\.py\b|localhost", text
        )
    assert rules.CHINESE.search(entry.zh)
    assert not rules.CHINESE.search(entry.en)
