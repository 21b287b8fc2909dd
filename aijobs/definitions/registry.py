"""The rule book: every definition and projector there is, checked at start-up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import ModuleType

from pydantic import BaseModel

from aijobs import errors
from aijobs.definitions.definition import (
    CREDENTIAL_MODES,
    DOMAINS,
    PLATFORM_KEY,
    QUEUES,
    JobDefinition,
)
from aijobs.definitions.projector import ResultProjector

JOB_TYPE = re.compile(r"[a-z][a-z0-9_]{1,63}")
TIMEOUT_MS = (1_000, 600_000)
MAX_OUTPUT_TOKENS = (1, 200_000)


def _default_route_alone(route: str | None, credential_mode: str) -> bool:
    return route is None and credential_mode == PLATFORM_KEY


def job_type_name(spelling: str) -> str:
    """The stored name of a job type as somebody wrote it: hyphens become underscores."""
    return spelling.replace("-", "_")


class JobDefinitionRegistry:
    """Definitions by job type, projectors by key.

    `prompt_exists(name, version)` says whether a definition's prompt is there, `has_route(route, credential_mode)`
    whether its calls go anywhere: what can't be done is refused at the start, not found out by a learner's job.
    """

    def __init__(
        self,
        prompt_exists: Callable[[str, str], bool] = lambda name, version: False,
        has_route: Callable[[str | None, str], bool] = _default_route_alone,
    ) -> None:
        self._definitions: dict[str, JobDefinition] = {}
        self._projectors: dict[str, ResultProjector] = {}
        self._prompt_exists, self._has_route = prompt_exists, has_route

    def register_projector(self, projector: ResultProjector) -> None:
        """Add a projector. `DuplicateProjector` where its key is taken."""
        if projector.key in self._projectors:
            raise errors.DuplicateProjector(f"projector {projector.key!r} is registered already")
        self._projectors[projector.key] = projector

    def register(self, definition: JobDefinition) -> None:
        """Check everything about `definition` and add it; a `DefinitionError` names the type and what is wrong."""
        if definition.job_type in self._definitions:
            raise errors.DuplicateJobDefinition(f"job type {definition.job_type!r} is registered already")
        for check in _CHECKS:
            check(definition)
        self._check_references(definition)
        self._definitions[definition.job_type] = definition

    def get(self, job_type: str) -> JobDefinition:
        """The definition of `job_type`; `UnknownJobType` where there is none."""
        try:
            return self._definitions[job_type]
        except KeyError:
            raise errors.UnknownJobType(f"unknown job type {job_type!r}") from None

    def find(self, job_type: str) -> JobDefinition | None:
        """The definition of `job_type`, or None."""
        return self._definitions.get(job_type)

    def get_all(self) -> list[JobDefinition]:
        """All definitions, by job type."""
        return [self._definitions[name] for name in sorted(self._definitions)]

    def projector(self, key: str) -> ResultProjector:
        """The projector with this key; `UnknownProjector` where there is none."""
        try:
            return self._projectors[key]
        except KeyError:
            raise errors.UnknownProjector(f"unknown projector {key!r}") from None

    def load(
        self, modules: Iterable[ModuleType], *, production: bool, timeouts: Mapping[str, float] | None = None
    ) -> None:
        """Register the definitions of these modules and the projectors that they bring.

        In production those not meant for it are left out. `timeouts`: an operator's seconds for an attempt, by job
        type. `UnknownJobType` if one of them is for no job type.
        """
        for module in modules:
            definition: JobDefinition = module.DEFINITION
            if production and not definition.production:
                continue
            if hasattr(module, "PROJECTOR"):
                self.register_projector(module.PROJECTOR)
            seconds = (timeouts or {}).get(definition.job_type)
            if seconds is not None:
                execution = replace(definition.execution, timeout_ms=round(seconds * 1000))
                definition = replace(definition, execution=execution)
            self.register(definition)
        for job_type in timeouts or {}:
            self.get(job_type)

    def _check_references(self, d: JobDefinition) -> None:
        if d.projector is not None and d.projector not in self._projectors:
            raise errors.UnknownProjector(f"{d.job_type}: projector {d.projector!r} is not registered")
        if (d.prompt is None) == (d.script is None):
            raise errors.UnknownPrompt(f"{d.job_type}: name a prompt, or a script for a type that asks no provider")
        if d.prompt is not None and not self._prompt_exists(d.prompt.name, d.prompt.version):
            raise errors.UnknownPrompt(f"{d.job_type}: there is no prompt {d.prompt.name}/{d.prompt.version}")
        self._check_routes(d)

    def _check_routes(self, d: JobDefinition) -> None:
        if d.prompt is None:
            if d.route is not None:
                raise errors.UnknownRoute(f"{d.job_type}: route {d.route!r} is for a type that asks a provider")
            return
        for mode in d.credential.allowed_modes:
            if not self._has_route(d.route, mode):
                named = "no route" if d.route is None else f"no route {d.route!r}"
                raise errors.UnknownRoute(f"{d.job_type}: {named} is configured for calls under {mode}")


def _check_name(d: JobDefinition) -> None:
    if not JOB_TYPE.fullmatch(d.job_type):
        raise errors.InvalidJobType(f"job type {d.job_type!r} does not match ^{JOB_TYPE.pattern}$")


def _check_metadata(d: JobDefinition) -> None:
    m = d.metadata
    if not (m.label.strip() and m.description.strip() and m.version.strip()) or m.domain not in DOMAINS:
        raise errors.InvalidMetadata(
            f"{d.job_type}: label, description and version are needed, and a domain out of {', '.join(DOMAINS)}"
        )


def _check_queue(d: JobDefinition) -> None:
    if d.queue.queue_name not in QUEUES:
        raise errors.InvalidQueue(f"{d.job_type}: queue {d.queue.queue_name!r} is none of {', '.join(QUEUES)}")
    if not _is_int(d.queue.default_priority) or not 0 <= d.queue.default_priority <= 100:
        raise errors.InvalidQueue(f"{d.job_type}: priority {d.queue.default_priority!r} is not within 0–100")


def _check_execution(d: JobDefinition) -> None:
    e = d.execution
    low, high = TIMEOUT_MS
    if not _is_int(e.timeout_ms) or not low <= e.timeout_ms <= high:
        raise errors.InvalidTimeout(f"{d.job_type}: timeout_ms {e.timeout_ms!r} is not within {low}–{high}")
    low, high = MAX_OUTPUT_TOKENS
    if not _is_int(d.max_output_tokens) or not low <= d.max_output_tokens <= high:
        raise errors.InvalidOutputLimit(
            f"{d.job_type}: max_output_tokens {d.max_output_tokens!r} is not within {low}–{high}"
        )
    if not _is_int(e.max_retries) or not 0 <= e.max_retries <= 20:
        raise errors.InvalidRetryPolicy(f"{d.job_type}: max_retries {e.max_retries!r} is not within 0–20")
    backoff = e.retry_backoff
    if backoff.type != "exponential" or not _is_int(backoff.delay) or not 0 < backoff.delay <= 3_600_000:
        raise errors.InvalidRetryPolicy(f"{d.job_type}: the backoff is exponential, from 1–3600000 ms")
    if e.abort_strategy not in ("fail", "retry"):
        raise errors.InvalidRetryPolicy(f"{d.job_type}: abort_strategy {e.abort_strategy!r} is not fail or retry")


def _check_schemas(d: JobDefinition) -> None:
    for name, part in (("input", d.input), ("output", d.output)):
        if not part.schema_version or len(part.schema_version) > 32:
            raise errors.InvalidSchema(f"{d.job_type}: {name} needs a schema version of 1–32 characters")
        if not (isinstance(part.schema, type) and issubclass(part.schema, BaseModel)):
            raise errors.InvalidSchema(f"{d.job_type}: the {name} schema is not a pydantic model")
    if d.output.validator is not None and not callable(d.output.validator):
        raise errors.InvalidSchema(f"{d.job_type}: the output's validator can't be called")


def _check_credential(d: JobDefinition) -> None:
    c = d.credential
    if not c.allowed_modes or not set(c.allowed_modes) <= set(CREDENTIAL_MODES):
        raise errors.InvalidCredentialModes(f"{d.job_type}: allowed modes are out of {', '.join(CREDENTIAL_MODES)}")
    if c.default_mode not in c.allowed_modes:
        raise errors.InvalidCredentialModes(f"{d.job_type}: default mode {c.default_mode!r} is not allowed")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CHECKS = (
    _check_name,
    _check_metadata,
    _check_queue,
    _check_execution,
    _check_schemas,
    _check_credential,
)
