"""All definitions and projectors, checked at start-up."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from aijobs.definitions import errors
from aijobs.definitions.definition import PLATFORM_KEY, JobDefinition
from aijobs.definitions.projector import ResultProjector

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def _default_route_alone(route: str | None, credential_mode: str) -> bool:
    return route is None and credential_mode == PLATFORM_KEY


def job_type_name(spelling: str) -> str:
    """Return the stored name of a job type: hyphens become underscores."""
    return spelling.replace("-", "_")


class JobDefinitionRegistry:
    """Definitions by job type, projectors by key.

    `prompt_exists(name, version)` returns whether a prompt exists, `has_route(route, credential_mode)` whether calls
    have a route: a definition that can't work is refused at the start, and not found by a learner's job.
    """

    def __init__(
        self,
        prompt_exists: Callable[[str, str], bool] = lambda name, version: False,
        has_route: Callable[[str | None, str], bool] = _default_route_alone,
    ) -> None:
        self._definitions: dict[str, JobDefinition] = {}
        self._projectors: dict[str, ResultProjector] = {}
        self._modules: dict[str, str] = {}
        """The module of each job type and projector, for messages."""
        self._prompt_exists, self._has_route = prompt_exists, has_route

    def register_projector(self, projector: ResultProjector, module: str = "") -> None:
        """Add a projector. `DuplicateProjector` if its key is taken."""
        what = f"projector {projector.key!r}"
        if projector.key in self._projectors:
            raise errors.DuplicateProjector(self._taken(what, module))
        self._projectors[projector.key] = projector
        self._modules[what] = module

    def register(self, definition: JobDefinition, module: str = "") -> None:
        """Check `definition` and add it. `DefinitionError` names the type and the fault.

        `module`: where it comes from, for the message about a job type that two modules have.
        """
        _check_fields(definition)
        what = f"job type {definition.job_type!r}"
        if definition.job_type in self._definitions:
            raise errors.DuplicateJobDefinition(self._taken(what, module))
        _check_default_mode(definition)
        self._check_references(definition)
        self._definitions[definition.job_type] = definition
        self._modules[what] = module

    def _taken(self, what: str, module: str) -> str:
        first = self._modules[what]
        return f"{module}: {what} is registered already by {first}" if module else f"{what} is registered already"

    def get(self, job_type: str) -> JobDefinition:
        """Return the definition of `job_type`; `UnknownJobType` if there is none."""
        try:
            return self._definitions[job_type]
        except KeyError:
            raise errors.UnknownJobType(f"unknown job type {job_type!r}") from None

    def find(self, job_type: str) -> JobDefinition | None:
        """Return the definition of `job_type`, or None."""
        return self._definitions.get(job_type)

    def get_all(self) -> list[JobDefinition]:
        """Return all definitions, ordered by job type."""
        return [self._definitions[name] for name in sorted(self._definitions)]

    def projector(self, key: str) -> ResultProjector:
        """Return the projector with this key; `UnknownProjector` if there is none."""
        try:
            return self._projectors[key]
        except KeyError:
            raise errors.UnknownProjector(f"unknown projector {key!r}") from None

    def load(
        self, modules: Iterable[ModuleType], *, production: bool, timeouts: Mapping[str, float] | None = None
    ) -> None:
        """Register the definitions and projectors of these modules.

        In production those not meant for it are left out. `timeouts`: an operator's seconds per attempt, by job type.
        `UnknownJobType` if one of them names no job type.
        """
        for module in modules:
            definition: JobDefinition = module.DEFINITION
            if production and definition.production is False:
                continue
            if hasattr(module, "PROJECTOR"):
                _check_projector(definition, module.PROJECTOR)
                self.register_projector(module.PROJECTOR, module.__name__)
            seconds = (timeouts or {}).get(definition.job_type)
            if seconds is not None:
                execution = replace(definition.execution, timeout_ms=round(seconds * 1000))
                definition = replace(definition, execution=execution)
            self.register(definition, module.__name__)
        for job_type in timeouts or {}:
            self.get(job_type)

    def _check_references(self, d: JobDefinition) -> None:
        if d.projector is not None and d.projector not in self._projectors:
            raise errors.UnknownProjector(_told(d, "projector", d.projector, "it is not registered"))
        if d.prompt is None and d.script is None:
            why = "name a prompt, or a script for a type that asks no provider"
            raise errors.UnknownPrompt(_told(d, "prompt", None, why))
        named = d.prompt and f"{d.prompt.name}/{d.prompt.version}"
        if d.prompt is not None and d.script is not None:
            raise errors.UnknownPrompt(_told(d, "prompt", named, "a type with a script has none"))
        if d.prompt is not None and not self._prompt_exists(d.prompt.name, d.prompt.version):
            raise errors.UnknownPrompt(_told(d, "prompt", named, "there is no such prompt"))
        self._check_routes(d)

    def _check_routes(self, d: JobDefinition) -> None:
        if d.prompt is None:
            if d.route is not None:
                raise errors.UnknownRoute(_told(d, "route", d.route, "only a type that asks a provider has one"))
            return
        for mode in d.credential.allowed_modes:
            if not self._has_route(d.route, mode):
                why = f"no such route is configured for calls under {mode}"
                raise errors.UnknownRoute(_told(d, "route", d.route, why))


def _check_projector(d: JobDefinition, projector: object) -> None:
    key, project = getattr(projector, "key", None), getattr(projector, "project", None)
    if isinstance(projector, type):
        why = "write an instance, not the class"
    elif not (isinstance(key, str) and key.strip()) or not callable(project):
        why = "it needs a `key`, which is a text, and a method `project`"
    elif not _takes_three(project):
        why = "its `project` takes (session, job, validated_output)"
    else:
        return
    raise errors.InvalidProjector(_told(d, "PROJECTOR", projector, why))


def _takes_three(function: Callable[..., object]) -> bool:
    try:
        signature(function).bind(None, None, None)
    except (TypeError, ValueError):
        return False
    return True


def _check_default_mode(d: JobDefinition) -> None:
    mode = d.credential.default_mode
    if mode not in d.credential.allowed_modes:
        why = "it is not among the allowed modes"
        raise errors.InvalidCredentialModes(_told(d, "credential.default_mode", mode, why))


@cache
def _rules() -> TypeAdapter[JobDefinition]:
    return TypeAdapter(JobDefinition)


_ERRORS: Mapping[str, type[errors.DefinitionError]] = {
    "job_type": errors.InvalidJobType,
    "metadata": errors.InvalidMetadata,
    "queue": errors.InvalidQueue,
    "execution": errors.InvalidRetryPolicy,
    "execution.timeout_ms": errors.InvalidTimeout,
    "input": errors.InvalidSchema,
    "output": errors.InvalidSchema,
    "credential": errors.InvalidCredentialModes,
    "projector": errors.UnknownProjector,
    "prompt": errors.UnknownPrompt,
    "route": errors.UnknownRoute,
    "max_output_tokens": errors.InvalidOutputLimit,
}
"""The error for a fault in a field, or in a whole part. Any other is an `InvalidField`."""


def _check_fields(d: JobDefinition) -> None:
    """Check the definition by its annotations. The error names the first wrong field."""
    try:
        _rules().validate_python(d)
    except ValidationError as wrong:
        faults = wrong.errors(include_url=False, include_context=False)
    else:
        return
    first = ".".join(map(str, faults[0]["loc"]))
    error = _ERRORS.get(first) or _ERRORS.get(first.partition(".")[0], errors.InvalidField)
    raise error(f"job type {_in_a_line(d.job_type)}: " + "; ".join(map(_fault, faults)))


def _fault(fault: ErrorDetails) -> str:
    path = ".".join(map(str, fault["loc"]))
    why = fault["msg"].removeprefix("Value error, ")
    return _is(path, fault["input"], f"{why[0].lower()}{why[1:]}")


def _told(d: JobDefinition, path: str, value: object, why: str) -> str:
    return f"job type {_in_a_line(d.job_type)}: {_is(path, value, why)}"


def _is(path: str, value: object, why: str) -> str:
    return f"{path} is {_in_a_line(value)}: {why}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def _in_a_line(value: object) -> str:
    """Return the `repr` of `value`, shortened if it is long."""
    return " ".join(_SHORT.repr(value).split())
