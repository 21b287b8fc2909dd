"""Build the registry of job types and check it against prompts and providers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.catalogue import Catalogue
from aijobs.ai.prompts import PromptTemplates
from aijobs.definitions.errors import UnknownJobType
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.errors import SettingsError


def build_registry(
    prompts: PromptTemplates,
    modules: Iterable[ModuleType],
    router: ModelRouter,
    *,
    production: bool,
    timeouts: Mapping[str, float] | None = None,
) -> JobDefinitionRegistry:
    """Return all job types and projectors, checked. `timeouts`: seconds per attempt that an operator set."""
    registry = JobDefinitionRegistry(prompts.exists, router.knows)
    try:
        registry.load(modules, production=production, timeouts=timeouts)
    except UnknownJobType as unknown:
        known = ", ".join(definition.job_type for definition in registry.get_all())
        raise SettingsError(f"AIJOBS_JOB_TIMEOUTS: {unknown}; there are {known}") from None
    return registry


def check_limits(catalogue: Catalogue, router: ModelRouter, registry: JobDefinitionRegistry) -> None:
    """Refuse a limit of the providers file that is longer than the time of a job that may use that provider.

    Default limits bend to the job's time.
    """
    for definition in registry.get_all():
        if definition.prompt is None:
            continue
        name, has_s = definition.job_type, definition.execution.timeout_ms / 1000
        modes = definition.credential.allowed_modes
        asked = {route.provider for mode in modes for route in router.routes(definition, mode)}
        for provider in sorted(asked & set(catalogue.providers)):
            for entry, seconds in catalogue.providers[provider].written_limits():
                if seconds > has_s:
                    raise SettingsError(
                        f"the providers file: {provider}: {entry} is {seconds:g}, but an attempt of {name} has "
                        f"{has_s:g} s: lower it, or set AIJOBS_JOB_TIMEOUTS={name}={seconds:g}"
                    )
