"""Find job types: our own modules, and those of installed packages.

A job type is a module with `DEFINITION`, optionally `PROJECTOR`, and its prompts in the folder `prompts` beside it. An
outside package names such a module in the entry-point group `aijobs.job_types`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from aijobs.definitions.definition import JobDefinition
from aijobs.definitions.errors import DefinitionError

ENTRY_POINT_GROUP = "aijobs.job_types"


def find_job_types(package: ModuleType) -> list[ModuleType]:
    """Return the modules in `package` and those of installed plug-ins. `DefinitionError` names one that is no
    job type.
    """
    names = [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(name) for name in names]
    modules += [_plugged_in(point.name, point.value) for point in entry_points(group=ENTRY_POINT_GROUP)]
    for module in modules:
        if not isinstance(getattr(module, "DEFINITION", None), JobDefinition):
            raise DefinitionError(f"{module.__name__} has no DEFINITION that is a JobDefinition")
    return modules


def _plugged_in(name: str, value: str) -> ModuleType:
    try:
        return importlib.import_module(value)
    except Exception as error:
        why = " ".join(str(error).split())
        raise DefinitionError(f"the job type {name!r} can't be loaded from {value}: {why}") from error


def prompt_folders(modules: Iterable[ModuleType]) -> list[Path]:
    """Return the prompt folders of these modules, each once."""
    folders = [Path(module.__file__).parent / "prompts" for module in modules if module.__file__]
    return list(dict.fromkeys(folders))
