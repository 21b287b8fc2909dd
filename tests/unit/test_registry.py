"""What a definition must be, checked when it is registered, with a named error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from aijobs import errors, job_types
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.provider import Route
from aijobs.definitions import discovery
from aijobs.definitions.definition import (
    Credential,
    Execution,
    Input,
    JobDefinition,
    Metadata,
    Output,
    PromptRef,
    Queue,
    RetryBackoff,
)
from aijobs.definitions.registry import JobDefinitionRegistry, job_type_name
from aijobs.errors import DefinitionError
from aijobs.job_types import synthetic
from aijobs.job_types.synthetic import DEFINITION, PROJECTOR


@pytest.fixture
def registry() -> JobDefinitionRegistry:
    router = ModelRouter({"default": (Route("local", "m"),), "large": (Route("local", "l"),)}, "default")
    registry = JobDefinitionRegistry(lambda name, version: (name, version) == ("cards", "v1"), router.knows)
    registry.register_projector(PROJECTOR)
    return registry


def with_execution(**changes: Any) -> JobDefinition:
    return replace(DEFINITION, execution=replace(DEFINITION.execution, **changes))


def with_metadata(**changes: Any) -> JobDefinition:
    return replace(DEFINITION, metadata=replace(DEFINITION.metadata, **changes))


ASKING = replace(DEFINITION, script=None, prompt=PromptRef("cards", "v1"), credential=Credential())
"""A type that asks a provider."""

GOOD = {
    "two letters": replace(DEFINITION, job_type="ab"),
    "64 characters": replace(DEFINITION, job_type="a" * 64),
    "digits": replace(DEFINITION, job_type="a1_2"),
    "shortest timeout": with_execution(timeout_ms=1000),
    "longest timeout": with_execution(timeout_ms=600_000),
    "no retry": with_execution(max_retries=0),
    "fail": with_execution(abort_strategy="fail"),
    "highest priority": replace(DEFINITION, queue=Queue("ai-background", 0)),
    "lowest priority": replace(DEFINITION, queue=Queue("ai-interactive", 100)),
    "no projector": replace(DEFINITION, projector=None),
    "prompt": ASKING,
    "route": replace(ASKING, route="large"),
    "script under any key": replace(DEFINITION, credential=Credential(("platform_key", "user_deepseek_key"))),
}

BAD: dict[str, tuple[JobDefinition, type[DefinitionError]]] = {
    "one letter": (replace(DEFINITION, job_type="a"), errors.InvalidJobType),
    "65 characters": (replace(DEFINITION, job_type="a" * 65), errors.InvalidJobType),
    "capital": (replace(DEFINITION, job_type="Ab"), errors.InvalidJobType),
    "hyphen": (replace(DEFINITION, job_type="a-b"), errors.InvalidJobType),
    "digit first": (replace(DEFINITION, job_type="1ab"), errors.InvalidJobType),
    "newline": (replace(DEFINITION, job_type="ab\n"), errors.InvalidJobType),
    "no name": (replace(DEFINITION, job_type=""), errors.InvalidJobType),
    "other digits": (replace(DEFINITION, job_type="a١"), errors.InvalidJobType),
    "no label": (with_metadata(label=" "), errors.InvalidMetadata),
    "no description": (with_metadata(description=""), errors.InvalidMetadata),
    "no version": (with_metadata(version=""), errors.InvalidMetadata),
    "unknown domain": (with_metadata(domain="fun"), errors.InvalidMetadata),
    "unknown queue": (replace(DEFINITION, queue=Queue("ai-maintenance")), errors.InvalidQueue),  # type: ignore[arg-type]
    "priority below": (replace(DEFINITION, queue=Queue("ai-background", -1)), errors.InvalidQueue),
    "priority above": (replace(DEFINITION, queue=Queue("ai-background", 101)), errors.InvalidQueue),
    "priority of another kind": (replace(DEFINITION, queue=Queue("ai-background", True)), errors.InvalidQueue),
    "timeout below": (with_execution(timeout_ms=999), errors.InvalidTimeout),
    "timeout above": (with_execution(timeout_ms=600_001), errors.InvalidTimeout),
    "timeout that is broken": (with_execution(timeout_ms=1000.5), errors.InvalidTimeout),
    "retries below": (with_execution(max_retries=-1), errors.InvalidRetryPolicy),
    "retries of another kind": (with_execution(max_retries=None), errors.InvalidRetryPolicy),
    "no wait": (with_execution(retry_backoff=RetryBackoff(0)), errors.InvalidRetryPolicy),
    "linear": (
        with_execution(retry_backoff=RetryBackoff(1, "linear")),  # type: ignore[arg-type]
        errors.InvalidRetryPolicy,
    ),
    "abort strategy": (with_execution(abort_strategy="hope"), errors.InvalidRetryPolicy),
    "no input version": (replace(DEFINITION, input=Input("", BaseModel)), errors.InvalidSchema),
    "long output version": (replace(DEFINITION, output=Output("1" * 33, BaseModel)), errors.InvalidSchema),
    "input schema": (replace(DEFINITION, input=Input("1", dict)), errors.InvalidSchema),  # type: ignore[arg-type]
    "validator": (replace(DEFINITION, output=Output("1", BaseModel, "check")), errors.InvalidSchema),  # type: ignore[arg-type]
    "no credential mode": (replace(DEFINITION, credential=Credential(())), errors.InvalidCredentialModes),
    "unknown credential mode": (
        replace(DEFINITION, credential=Credential(("theirs",))),  # type: ignore[arg-type]
        errors.InvalidCredentialModes,
    ),
    "default mode": (
        replace(DEFINITION, credential=Credential(("platform_key",), "user_deepseek_key")),
        errors.InvalidCredentialModes,
    ),
    "projector": (replace(DEFINITION, projector="nobody"), errors.UnknownProjector),
    "neither prompt nor script": (replace(DEFINITION, script=None), errors.UnknownPrompt),
    "prompt and script": (replace(DEFINITION, prompt=PromptRef("cards", "v1")), errors.UnknownPrompt),
    "prompt version": (replace(DEFINITION, script=None, prompt=PromptRef("cards", "v2")), errors.UnknownPrompt),
    "route that nobody configured": (replace(ASKING, route="elsewhere"), errors.UnknownRoute),
    "route without a name": (replace(ASKING, route=""), errors.UnknownRoute),
    "route of a script": (replace(DEFINITION, route="large"), errors.UnknownRoute),
    "users' keys that go nowhere": (
        replace(ASKING, credential=Credential(("platform_key", "user_deepseek_key"))),
        errors.UnknownRoute,
    ),
}


@pytest.mark.parametrize("which", GOOD)
def test_a_definition_within_the_bounds_is_taken(registry: JobDefinitionRegistry, which: str) -> None:
    registry.register(GOOD[which])
    assert registry.get(GOOD[which].job_type) is GOOD[which]


@pytest.mark.parametrize("which", BAD)
def test_a_definition_beyond_the_bounds_is_refused_by_name_and_is_not_there(
    registry: JobDefinitionRegistry, which: str
) -> None:
    definition, error = BAD[which]
    with pytest.raises(error) as refused:
        registry.register(definition)
    assert type(refused.value) is error
    assert (definition.job_type or "''") in str(refused.value) or repr(definition.job_type) in str(refused.value)
    assert registry.get_all() == []


def test_a_type_is_registered_once_and_a_projector_too(registry: JobDefinitionRegistry) -> None:
    registry.register(DEFINITION)
    with pytest.raises(errors.DuplicateJobDefinition, match="synthetic"):
        registry.register(replace(DEFINITION, metadata=replace(DEFINITION.metadata, version="2")))
    assert registry.get("synthetic") is DEFINITION
    with pytest.raises(errors.DuplicateProjector, match="synthetic"):
        registry.register_projector(PROJECTOR)


def test_an_unknown_type_or_projector_is_named(registry: JobDefinitionRegistry) -> None:
    with pytest.raises(errors.UnknownJobType, match="nope"):
        registry.get("nope")
    with pytest.raises(errors.UnknownProjector, match="nope"):
        registry.projector("nope")
    assert registry.find("nope") is None


def test_all_definitions_are_listed_by_name(registry: JobDefinitionRegistry) -> None:
    for name in ("zz", "aa", "mm"):
        registry.register(replace(DEFINITION, job_type=name))
    assert [definition.job_type for definition in registry.get_all()] == ["aa", "mm", "zz"]


def test_definitions_are_frozen_to_the_bottom() -> None:
    for part in (
        DEFINITION,
        DEFINITION.metadata,
        DEFINITION.queue,
        DEFINITION.execution,
        DEFINITION.execution.retry_backoff,
        DEFINITION.input,
        DEFINITION.output,
        DEFINITION.credential,
        DEFINITION.security,
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, "other")
    assert isinstance(DEFINITION.metadata, Metadata)
    assert isinstance(DEFINITION.execution, Execution)


def test_what_is_not_meant_for_production_stays_out_of_it() -> None:
    registry = JobDefinitionRegistry()
    real = SimpleNamespace(DEFINITION=replace(DEFINITION, job_type="real", projector=None, production=True))
    modules: Any = [synthetic, real]
    registry.load(modules, production=True)
    assert [definition.job_type for definition in registry.get_all()] == ["real"]
    with pytest.raises(errors.UnknownProjector):
        registry.projector("synthetic")


def test_an_operators_timeout_stands_in_place_of_the_definitions() -> None:
    registry, modules = JobDefinitionRegistry(), [synthetic]
    registry.load(modules, production=False, timeouts={"synthetic": 1.5})  # type: ignore[arg-type]
    assert registry.get("synthetic").execution == replace(DEFINITION.execution, timeout_ms=1500)
    assert DEFINITION.execution.timeout_ms == 600_000


def test_an_operators_timeout_for_no_job_type_is_named() -> None:
    with pytest.raises(errors.UnknownJobType, match="poem"):
        JobDefinitionRegistry().load([], production=False, timeouts={"poem": 3})


PLUG_INS = {
    "good_one": "from dataclasses import replace\n"
    "from aijobs.job_types import synthetic\n"
    "DEFINITION = replace(synthetic.DEFINITION, job_type='plugged_in')\n",
    "missing_import": "import a_package_that_nobody_has\n",
    "syntax": "def (:\n",
    "raises": "raise RuntimeError('mine')\n",
    "no_definition": "",
    "wrong_definition": "DEFINITION = 'synthetic'\n",
}


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`plug_in(name)`: install a package that offers this module as a job type."""

    def install(name: str) -> None:
        module = f"aijobs_test_plug_in_{name}"
        (tmp_path / f"{module}.py").write_text(PLUG_INS.get(name, ""))
        if name not in PLUG_INS:
            module = "aijobs_test_plug_in_nowhere"
        monkeypatch.syspath_prepend(tmp_path)
        point = EntryPoint(name, module, discovery.ENTRY_POINT_GROUP)
        monkeypatch.setattr(discovery, "entry_points", lambda group: [point])

    return install


def test_installed_packages_add_job_types(registry: JobDefinitionRegistry, plug_in: Callable[[str], None]) -> None:
    plug_in("good_one")
    modules = discovery.find_job_types(job_types)
    assert [module.DEFINITION.job_type for module in modules][-1] == "plugged_in"
    registry.load(modules[-1:], production=False)
    assert registry.get("plugged_in").script is DEFINITION.script


@pytest.mark.parametrize("name", [*sorted(set(PLUG_INS) - {"good_one"}), "nowhere_to_be_found"])
def test_a_plug_in_that_can_not_be_loaded_stops_the_start_with_its_name(
    plug_in: Callable[[str], None], name: str
) -> None:
    plug_in(name)
    with pytest.raises(DefinitionError, match=name):
        discovery.find_job_types(job_types)


def test_a_hyphen_in_a_name_is_an_underscore() -> None:
    assert job_type_name("active-recall") == "active_recall"


def test_what_a_definition_can_not_have_is_named(registry: JobDefinitionRegistry) -> None:
    with pytest.raises(errors.UnknownRoute, match="user_deepseek_key"):
        registry.register(replace(ASKING, credential=Credential(("user_deepseek_key",), "user_deepseek_key")))
    with pytest.raises(errors.UnknownRoute, match="elsewhere"):
        registry.register(replace(ASKING, route="elsewhere"))
