"""Versioned prompts: Jinja files in the repository, rendered with the user's text as data.

`<root>/<job_type>/<version>/system.md.j2` and `user.md.j2`. The learner's text reaches a template only as values, so
nothing in it is expanded. It stands between fence marks that don't occur in it, so no note can close its own fence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader, StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aijobs.definitions.errors import UnknownPrompt
from aijobs.errors import JobError

MAX_CHARACTERS = 200_000
MAX_FAULTS = 5
VARIABLES = frozenset({"input", "output_schema", "faults", "fence"})
"""The variables of a template: the snapshot's content, the output schema as JSON text, the faults of the last answer
(empty at first), and the fence mark.
"""

NEEDED = frozenset({"input", "output_schema", "faults", "fence"})
"""The variables that each prompt must use. Without the fence, notes would be instructions; without the faults, a second
try would repeat the first.
"""

_PARTS = ("system", "user")
_WORDS = {
    "the word json": re.compile(r"\bjson\b", re.IGNORECASE),
    "an example": re.compile(r"\bexample\b|例如|示例", re.IGNORECASE),
}
"""Providers with JSON mode refuse a prompt without this word, and models follow an example best."""
_VERSION = re.compile(r"v[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt: the rules, and the request with the user's text."""

    system: str = field(repr=False)
    user: str = field(repr=False)


@cache
def _environment_of(roots: tuple[Path, ...]) -> ImmutableSandboxedEnvironment:
    """Return the Jinja environment of these folders, with its compiled templates."""
    # Prompts are plain text: HTML escaping would change the learner's text.
    return ImmutableSandboxedEnvironment(
        loader=FileSystemLoader([str(root) for root in roots]),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
    )


class PromptTemplates:
    """The prompt files below `roots`. If two roots have the same file, the first one counts."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)

    @property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        return _environment_of(self._roots)

    def versions(self, job_type: str) -> list[str]:
        """Return the complete versions of a job type's prompt, oldest first; empty if it has none."""
        found = {
            folder.name
            for root in self._roots
            for folder in root.joinpath(job_type).glob("v*")
            if _VERSION.fullmatch(folder.name) and all(folder.joinpath(f"{part}.md.j2").is_file() for part in _PARTS)
        }
        return sorted(found, key=lambda version: int(version[1:]))

    def exists(self, job_type: str, version: str) -> bool:
        """Return whether this version exists and is complete. `UnknownPrompt` if it is broken.

        Called when a definition is registered, so that a template that doesn't compile, uses an unknown variable, or
        lacks a required one stops a start and never a job.
        """
        if version not in self.versions(job_type):
            return False
        used: set[str] = set()
        text = ""
        for part in _PARTS:
            name = _name(job_type, version, part)
            variables = self._undeclared(name)
            if unknown := variables - VARIABLES:
                raise UnknownPrompt(f"prompt {name} uses unknown {', '.join(sorted(unknown))}")
            used |= variables
            text += self._source(name)
        if lacking := [*_lacking(text), *sorted(NEEDED - used)]:
            raise UnknownPrompt(f"prompt {job_type}/{version} lacks {', '.join(lacking)}")
        return True

    def _source(self, name: str) -> str:
        loader = self._environment.loader
        assert loader is not None, "the environment is made with a loader"
        return loader.get_source(self._environment, name)[0]

    def render(self, job_type: str, version: str, variables: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a job type and version.

        `variables`: `input` (the snapshot's content), `output_schema` (JSON text) and optionally `faults`, of which
        five at most are used. Raises `JobError`: INTERNAL_CONFIG if the version doesn't exist any more or the template
        fails, VALIDATION_INPUT_TOO_LARGE if the prompt would exceed `MAX_CHARACTERS`.
        """
        values = {"faults": (), **variables}
        values["faults"] = tuple(_one_line(fault) for fault in values["faults"])[:MAX_FAULTS]
        values["fence"] = fence_for(values)
        rendered = [self._render(self._template(job_type, version, part), values) for part in _PARTS]
        return Prompt(system=rendered[0], user=rendered[1])

    def _template(self, job_type: str, version: str, part: str) -> Template:
        if version not in self.versions(job_type):
            raise JobError("INTERNAL_CONFIG", f"there is no prompt {job_type}/{version}")
        name = _name(job_type, version, part)
        try:
            return self._environment.get_template(name)
        except TemplateError as error:
            raise JobError("INTERNAL_CONFIG", f"prompt {name} does not compile: {type(error).__name__}") from error

    def _undeclared(self, name: str) -> set[str]:
        """Return the variables that a template and its includes read but don't set."""
        try:
            self._environment.get_template(name)  # parsing alone accepts unknown filters
            tree = self._environment.parse(self._source(name))
            included = [part for part in meta.find_referenced_templates(tree) if part is not None]
            return meta.find_undeclared_variables(tree).union(*(self._undeclared(part) for part in included))
        except TemplateError as error:
            raise UnknownPrompt(f"prompt {name} does not compile: {type(error).__name__}") from error

    @staticmethod
    def _render(template: Template, values: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(values):
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise JobError("VALIDATION_INPUT_TOO_LARGE", f"the prompt passes {MAX_CHARACTERS} characters")
                pieces.append(piece)
        except (TemplateError, TypeError, LookupError, ValueError) as error:
            # Only the class: the error's text may quote the learner.
            raise JobError("INTERNAL_CONFIG", f"prompt {template.name} failed: {type(error).__name__}") from None
        return "".join(pieces).strip()


def _lacking(text: str) -> list[str]:
    return [what for what, pattern in _WORDS.items() if not pattern.search(text)]


def _name(job_type: str, version: str, part: str) -> str:
    return f"{job_type}/{version}/{part}.md.j2"


def fence_for(values: Any) -> str:
    """Return a mark that occurs in none of the strings of `values`: the same for the same values, so that prompts stay
    cacheable.
    """
    texts = list(_strings(values))
    digest = hashlib.sha256("\x1f".join(texts).encode("utf-8", "surrogatepass"))
    while True:
        mark = f"data-{digest.hexdigest()[:16]}"
        if not any(mark in text for text in texts):
            return mark
        digest.update(b"again")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
