"""The console over a real database and broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jinja2 import FileSystemBytecodeCache

from aijobs.web.factory import create_app
from aijobs.wiring import build_services
from tests.web.console.stage import Stage, build_settings, prepare


@pytest.fixture(scope="session")
def compiled_templates(tmp_path_factory: pytest.TempPathFactory) -> FileSystemBytecodeCache:
    """Templates are compiled once for all applications of this test process."""
    return FileSystemBytecodeCache(str(tmp_path_factory.mktemp("templates")))


@pytest.fixture
def stage(
    create_sqlite_database: Callable[..., str],
    redis_url: str,
    tmp_path: Path,
    compiled_templates: FileSystemBytecodeCache,
) -> Iterator[Stage]:
    """An application with its services, and a worker that runs jobs when told to."""
    services = build_services(build_settings(create_sqlite_database(prepare), redis_url, tmp_path))
    app = create_app(services=services)
    app.testing = True
    app.jinja_env.bytecode_cache = compiled_templates
    yield Stage(services, app)
    services.database.engine.dispose()
