"""The documentation is correct: settings, commands, codes, links, the Redis user, the decisions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from urllib.parse import unquote

import click
import pytest

from aijobs import settings as settings_module
from aijobs.cli import cli
from aijobs.errors import CODES
from aijobs.jobs.history import HistoryType
from aijobs.jobs.status import Phase
from aijobs.queues.connection import ACL_RULES
from aijobs.settings import Settings
from aijobs.web.api import admin, user
from tests.contracts import documents
from tests.contracts.sources import ROOT

FOUND_OUT = {"env_was_set", "development_keys", "run_by_flask", "provider_keys"}
"""Fields about the origin of the settings; no variable sets them."""


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- settings -----------------------------------------------------------------------------------------------


PROVIDER_KEY = re.compile(r"AIJOBS_[A-Z0-9_]+_API_KEY")
"""The platform's keys, which are named after the providers of a file."""


def documented_settings() -> dict[str, str]:
    """Return each setting with the cell of its default."""
    table = [row for row in documents.rows(documents.read("docs/settings.md")) if row[0].startswith("`")]
    return {row[0].strip("`"): row[1] for row in table}


def settable() -> dict[str, object]:
    """Return each variable that the settings read, with its default."""
    return {f"AIJOBS_{f.name.upper()}": f.default for f in fields(Settings) if f.name not in FOUND_OUT}


def test_exactly_the_existing_settings_are_documented() -> None:
    assert set(documented_settings()) == set(settable())


def test_documented_defaults_match_the_code() -> None:
    wrong = []
    for name, default in settable().items():
        cell = documented_settings()[name]
        if isinstance(default, str | int | float) and default != "":
            expected = f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
            if cell != expected:
                wrong.append(f"{name}: {cell}, not {expected}")
        else:
            assert default in ("", MISSING) or not isinstance(default, str | int | float)
            if re.fullmatch(r"`[^`/]*`", cell):
                wrong.append(f"{name}: {cell}, but the code has no plain default")
    assert not wrong


def test_every_documented_setting_is_read(tmp_path: Path) -> None:
    """A documented variable that nothing reads would have no effect."""
    source = Path(settings_module.__file__).read_text(encoding="utf-8")
    for name in documented_settings():
        field = name.removeprefix("AIJOBS_").lower()
        assert re.search(rf"\b{field}\b", source), name
    given = {"AIJOBS_INSTANCE_PATH": str(tmp_path), "AIJOBS_PORT": "8123", "AIJOBS_LEASE_S": "90.5"}
    loaded = Settings.load(given)
    assert (loaded.port, loaded.lease_s, loaded.instance_path) == (8123, 90.5, tmp_path)


def test_pages_name_only_existing_settings() -> None:
    unknown = [
        f"{names(page)}: {name}"
        for page in documents.pages()
        for name in re.findall(r"AIJOBS_[A-Z_]*[A-Z]", page.read_text(encoding="utf-8"))
        if name not in settable() and not PROVIDER_KEY.fullmatch(name)
    ]
    assert not unknown


# --- commands -----------------------------------------------------------------------------------------------


def commands(group: click.Command = cli, path: str = "aijobs") -> Iterator[tuple[str, click.Command]]:
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            yield from commands(command, f"{path} {name}")
    else:
        yield path, group


def test_exactly_the_existing_commands_are_documented() -> None:
    cells = [row[0] for row in documents.rows(documents.read("docs/commands.md")) if row[0].startswith("`aijobs")]
    written = {re.sub(r"\s+(\[?[A-Z]+\]?|--\S+).*$", "", cell.strip("`")) for cell in cells}
    assert written == {path for path, _ in commands()}


def test_pages_show_only_existing_commands() -> None:
    known = {path for path, _ in commands()} | {"aijobs COMMAND"}
    words = {word for path in known for word in path.split()[1:2]}
    shown = [
        (names(page), found)
        for page in documents.pages()
        for found in re.findall(r"(?:`|^|bin/)aijobs ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not [(page, word) for page, word in shown if word not in words]


def test_pages_show_only_existing_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", documents.read("Makefile"), re.MULTILINE))
    shown = {
        word
        for page in documents.pages()
        for word in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert shown <= targets


# --- APIs ---------------------------------------------------------------------------------------------------


def test_every_operation_is_documented() -> None:
    page = documents.read("docs/api.md")
    for operation in (*user.OPERATIONS, *admin.OPERATIONS):
        assert re.search(rf"`{operation.method} {re.escape(operation.path)}[`?]", page), operation.path


def test_every_parameter_of_an_operation_is_documented() -> None:
    page = documents.read("docs/api.md")
    parameters = {name for operation in (*user.OPERATIONS, *admin.OPERATIONS) for name in operation.parameters}
    assert not [name for name in sorted(parameters) if not re.search(rf"\b{name}\b", page)]


def test_every_code_of_the_api_is_documented_with_its_status() -> None:
    table = {row[0].strip("`"): row[1] for row in documents.rows(documents.read("docs/api.md")) if len(row) == 3}
    written = {code: int(status) for code, status in table.items() if code in CODES}
    answered = {code for operation in (*user.OPERATIONS, *admin.OPERATIONS) for code in operation.errors}
    answered |= {"INTERNAL_ERROR", "SERVICE_BUSY", "METHOD_NOT_ALLOWED", "RATE_LIMITED"}
    assert answered == set(written)
    assert written == {code: CODES[code].http for code in written}


def test_pages_name_only_existing_codes() -> None:
    prefixes = ("PROVIDER_", "VALIDATION_", "CONTENT_SAFETY_", "CREDENTIAL_", "INTERNAL_", "JOB_")
    unknown = [
        f"{names(page)}: {word}"
        for page in documents.pages()
        for word in re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", page.read_text(encoding="utf-8"))
        if word.startswith(prefixes) and word not in CODES
    ]
    assert not unknown


# --- lifecycle, Redis, decisions ----------------------------------------------------------------------------


@pytest.mark.parametrize("words", [HistoryType, Phase])
def test_lifecycle_page_explains_every_phase_and_history_type(words: tuple[str, ...]) -> None:
    cells = {
        word for row in documents.rows(documents.read("docs/lifecycle.md")) for word in re.findall(r"`(\w+)`", row[0])
    }
    assert set(words) <= cells


def test_documented_redis_user_has_the_acl_rules_of_the_tests() -> None:
    assert f"ACL SETUSER aijobs on >PASSWORD {ACL_RULES}\n" in documents.read("docs/production.md")


def test_readme_and_production_page_show_the_same_four_commands() -> None:
    (readme,) = (
        b.text for b in documents.blocks(documents.read("README.md")) if "huey_consumer" in b.text and b.language
    )
    assert len(readme.splitlines()) == 4
    assert readme in documents.read("docs/production.md")


def test_every_decision_is_in_the_index_and_has_three_parts() -> None:
    index = documents.links(documents.read("docs/adr/README.md"))
    for record in sorted((ROOT / "docs" / "adr").glob("0*.md")):
        assert record.name in index
        text = record.read_text(encoding="utf-8")
        assert all(part in text for part in ("**Context.**", "**Decision.**", "**Consequence.**")), record.name
        assert text.startswith(f"# {int(record.name[:4])}. ")


# --- links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", documents.pages(), ids=names)
def test_every_link_has_a_target(page: Path) -> None:
    broken = []
    for link in documents.links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        there = target.exists() and (not anchor or anchor in documents.headings(target.read_text(encoding="utf-8")))
        if not there:
            broken.append(link)
    assert not broken


def test_every_page_is_linked() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in documents.pages()
        for link in documents.links(page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", link)
    }
    assert not [names(page) for page in documents.pages() if page != ROOT / "README.md" and page not in linked]
