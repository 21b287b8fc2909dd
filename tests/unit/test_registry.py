"""Rules for definitions, checked at registration with a named error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

from aijobs import job_types
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.provider import Route
from aijobs.definitions import discovery, errors
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
from aijobs.definitions.errors import DefinitionError
from aijobs.definitions.registry import JobDefinitionRegistry, job_type_name
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
"""A type that calls a provider."""

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
def test_definition_within_the_bounds_is_registered(registry: JobDefinitionRegistry, which: str) -> None:
    registry.register(GOOD[which])
    assert registry.get(GOOD[which].job_type) is GOOD[which]


@pytest.mark.parametrize("which", BAD)
def test_definition_beyond_the_bounds_is_refused_by_name(registry: JobDefinitionRegistry, which: str) -> None:
    definition, error = BAD[which]
    with pytest.raises(error) as refused:
        registry.register(definition)
    assert type(refused.value) is error
    assert re.match(rf"job type {re.escape(repr(definition.job_type))}: [\w.]+ is .+: \w", str(refused.value))
    assert registry.get_all() == []


def test_modules_with_the_same_job_type_are_both_named(registry: JobDefinitionRegistry) -> None:
    first = SimpleNamespace(__name__="first", DEFINITION=DEFINITION)
    second = SimpleNamespace(__name__="second", DEFINITION=DEFINITION)
    modules: Any = [first, second]
    with pytest.raises(errors.DuplicateJobDefinition) as refused:
        registry.load(modules, production=False)
    assert str(refused.value) == "second: job type 'synthetic' is registered already by first"


def test_modules_with_the_same_projector_are_both_named(registry: JobDefinitionRegistry) -> None:
    other = replace(DEFINITION, job_type="other", projector="shared")
    projector = SimpleNamespace(key="shared", project=print)
    modules: Any = [
        SimpleNamespace(__name__="first", DEFINITION=other, PROJECTOR=projector),
        SimpleNamespace(__name__="second", DEFINITION=DEFINITION, PROJECTOR=projector),
    ]
    with pytest.raises(errors.DuplicateProjector) as refused:
        registry.load(modules, production=False)
    assert str(refused.value) == "second: projector 'shared' is registered already by first"


FOREIGN: tuple[Any, ...] = (None, 5, 1.5, True, "text", b"bytes", ("text",), ["text"], {"a": 1}, object())
"""One value of each type that an author might use by mistake."""


def accepts(hint: Any, value: Any) -> bool:
    """Return whether a field annotated with `hint` may hold `value`, apart from its bounds."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(accepts(each, value) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if origin is tuple:
        return isinstance(value, tuple) and all(accepts(arguments[0], each) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values())
    return type(value) is hint if hint in (str, int, bool, NoneType) else isinstance(value, hint)


def field_paths(part: type, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (`execution.timeout_ms`, its annotation) for each field of a definition and of its parts."""
    for name, hint in get_type_hints(part).items():
        inner = [each for each in (hint, *get_args(hint)) if isinstance(each, type) and is_dataclass(each)]
        yield f"{path}{name}", hint
        for each in inner:
            yield from field_paths(each, f"{path}{name}.")


PATHS = dict(field_paths(JobDefinition))


def with_value(part: Any, path: str, value: Any) -> Any:
    name, _, rest = path.partition(".")
    return replace(part, **{name: with_value(getattr(part, name), rest, value) if rest else value})


@pytest.mark.parametrize("path", PATHS)
def test_field_of_the_wrong_type_is_refused_in_one_line_with_job_type_and_field(
    registry: JobDefinitionRegistry, path: str
) -> None:
    whole = ASKING if path.startswith("prompt") else DEFINITION
    wrong = [value for value in FOREIGN if not accepts(PATHS[path], value)]
    assert wrong
    for value in wrong:
        definition = with_value(whole, path, value)
        with pytest.raises(DefinitionError) as refused:
            registry.register(definition)
        text = str(refused.value)
        assert text.startswith(f"job type {definition.job_type!r}: ")
        assert f"{path} is " in text or f"{path}." in text
        assert "\n" not in text
        assert type(refused.value) is not DefinitionError
    assert registry.get_all() == []


BLANKS = ("", " ", "\t", "1 ", " 1", "1\n", "1\x00", "v" * 33)


@pytest.mark.parametrize("path", ["input.schema_version", "output.schema_version", "prompt.version"])
@pytest.mark.parametrize("version", BLANKS)
def test_version_that_cannot_be_stored_or_compared_is_refused(path: str, version: str) -> None:
    registry = JobDefinitionRegistry(lambda name, version: True)
    registry.register_projector(PROJECTOR)
    with pytest.raises(DefinitionError, match=rf"'synthetic': {path} is"):
        registry.register(with_value(ASKING, path, version))


@pytest.mark.parametrize("production", [None, 0, "no"])
def test_invalid_production_flag_is_refused_in_production(production: Any) -> None:
    module: Any = SimpleNamespace(
        __name__="module", DEFINITION=replace(DEFINITION, projector=None, production=production)
    )
    with pytest.raises(DefinitionError, match="production is"):
        JobDefinitionRegistry().load([module], production=True)


def test_refusal_of_any_value_is_one_line(registry: JobDefinitionRegistry) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    for value in (Broken(), "two\nlines" * 1000):
        with pytest.raises(errors.InvalidQueue) as refused:
            registry.register(replace(DEFINITION, queue=Queue(value)))  # type: ignore[arg-type]
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "projector",
    [
        None,
        "synthetic",
        SimpleNamespace(),
        SimpleNamespace(key=5, project=print),
        SimpleNamespace(key=" ", project=print),
        SimpleNamespace(key="mine"),
        SimpleNamespace(key="mine", project="run"),
        SimpleNamespace(key="mine", project=lambda session, job: None),
        type(PROJECTOR),
    ],
)
def test_invalid_projector_is_refused_with_its_job_type(projector: Any) -> None:
    module: Any = SimpleNamespace(__name__="module", DEFINITION=DEFINITION, PROJECTOR=projector)
    with pytest.raises(errors.InvalidProjector, match=r"job type 'synthetic': PROJECTOR is .+: "):
        JobDefinitionRegistry().load([module], production=False)


def test_second_registration_of_a_type_or_projector_is_refused(registry: JobDefinitionRegistry) -> None:
    registry.register(DEFINITION)
    with pytest.raises(errors.DuplicateJobDefinition, match="synthetic"):
        registry.register(replace(DEFINITION, metadata=replace(DEFINITION.metadata, version="2")))
    assert registry.get("synthetic") is DEFINITION
    with pytest.raises(errors.DuplicateProjector, match="synthetic"):
        registry.register_projector(PROJECTOR)


def test_unknown_type_or_projector_is_named(registry: JobDefinitionRegistry) -> None:
    with pytest.raises(errors.UnknownJobType, match="nope"):
        registry.get("nope")
    with pytest.raises(errors.UnknownProjector, match="nope"):
        registry.projector("nope")
    assert registry.find("nope") is None


def test_definitions_are_listed_by_name(registry: JobDefinitionRegistry) -> None:
    for name in ("zz", "aa", "mm"):
        registry.register(replace(DEFINITION, job_type=name))
    assert [definition.job_type for definition in registry.get_all()] == ["aa", "mm", "zz"]


def test_definitions_are_frozen_with_all_their_parts() -> None:
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


def test_development_types_are_not_loaded_in_production() -> None:
    registry = JobDefinitionRegistry()
    real = SimpleNamespace(
        __name__="real", DEFINITION=replace(DEFINITION, job_type="real", projector=None, production=True)
    )
    modules: Any = [synthetic, real]
    registry.load(modules, production=True)
    assert [definition.job_type for definition in registry.get_all()] == ["real"]
    with pytest.raises(errors.UnknownProjector):
        registry.projector("synthetic")


def test_configured_timeout_overrides_the_definition() -> None:
    registry, modules = JobDefinitionRegistry(), [synthetic]
    registry.load(modules, production=False, timeouts={"synthetic": 1.5})  # type: ignore[arg-type]
    assert registry.get("synthetic").execution == replace(DEFINITION.execution, timeout_ms=1500)
    assert DEFINITION.execution.timeout_ms == 600_000


def test_configured_timeout_for_an_unknown_job_type_is_named() -> None:
    with pytest.raises(errors.UnknownJobType, match="poem"):
        JobDefinitionRegistry().load([], production=False, timeouts={"poem": 3})


PLUG_INS = {
    "good_one": "from dataclasses import replace\n"
    "from aijobs.job_types import synthetic\n"
    "DEFINITION = replace(synthetic.DEFINITION, job_type='plugged_in')\n",
    "wrong_field": "from dataclasses import replace\n"
    "from aijobs.job_types.synthetic import DEFINITION as D\n"
    "DEFINITION = replace(D, job_type='plugged_in', metadata=replace(D.metadata, label=5))\n",
    "missing_import": "import a_package_that_nobody_has\n",
    "syntax": "def (:\n",
    "raises": "raise RuntimeError('mine')\n",
    "no_definition": "",
    "wrong_definition": "DEFINITION = 'synthetic'\n",
    "several_lines": "import pydantic\nclass M(pydantic.BaseModel):\n    a: int\nM(a='x')\n",
    "missing_part": "from aijobs.definitions.definition import JobDefinition\nDEFINITION = JobDefinition('mine')\n",
}


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`plug_in(name)` installs a package that offers this module as a job type."""

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


@pytest.mark.parametrize("name", [*sorted(set(PLUG_INS) - {"good_one", "wrong_field"}), "nowhere_to_be_found"])
def test_plug_in_that_cannot_be_loaded_stops_the_start_and_is_named(plug_in: Callable[[str], None], name: str) -> None:
    plug_in(name)
    with pytest.raises(DefinitionError, match=name) as refused:
        discovery.find_job_types(job_types)
    assert "\n" not in str(refused.value)


def test_invalid_definition_of_a_plug_in_is_refused_with_job_type_and_field(
    registry: JobDefinitionRegistry, plug_in: Callable[[str], None]
) -> None:
    plug_in("wrong_field")
    modules = discovery.find_job_types(job_types)
    with pytest.raises(errors.InvalidMetadata, match=r"'plugged_in': metadata\.label is 5"):
        registry.load(modules[-1:], production=False)


def test_hyphen_in_a_job_type_name_becomes_an_underscore() -> None:
    assert job_type_name("active-recall") == "active_recall"


def test_unknown_route_of_a_definition_is_named(registry: JobDefinitionRegistry) -> None:
    with pytest.raises(errors.UnknownRoute, match="user_deepseek_key"):
        registry.register(replace(ASKING, credential=Credential(("user_deepseek_key",), "user_deepseek_key")))
    with pytest.raises(errors.UnknownRoute, match="elsewhere"):
        registry.register(replace(ASKING, route="elsewhere"))
