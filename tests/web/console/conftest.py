"""Fixtures: the console over a real database and broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import FileSystemBytecodeCache

from aijobs.web.factory import create_app
from aijobs.wiring.services import build_services
from tests.support.databases import SqliteDatabases
from tests.support.scratch import open_database, scratch_database
from tests.web.console.stage import Stage, add_operators, build_settings


@pytest.fixture(scope="session")
def compiled_templates(tmp_path_factory: pytest.TempPathFactory) -> FileSystemBytecodeCache:
    """Compile templates once for all applications of this test process."""
    return FileSystemBytecodeCache(str(tmp_path_factory.mktemp("templates")))


@pytest.fixture
def stage(
    sqlite: SqliteDatabases,
    redis_url: str,
    tmp_path: Path,
    compiled_templates: FileSystemBytecodeCache,
) -> Iterator[Stage]:
    """An application with its services, and a worker that runs jobs on demand."""
    settings = build_settings(scratch_database(sqlite, add_operators), redis_url, tmp_path)
    with open_database(settings.database_url) as database:
        app = create_app(services=(services := build_services(settings, database=database)))
        app.testing = True
        app.jinja_env.bytecode_cache = compiled_templates
        yield Stage(services, app)
