"""Fixtures over real parts: broker, databases, browser, processes.

Servers start when the first test needs them, once for each test process, and end with it. A part that the machine
lacks skips the test, or fails it if CI=true.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from aijobs.ai.prompts import PromptTemplates
from aijobs.definitions import discovery
from aijobs.web import plugins
from aijobs.wiring import services
from tests.support.chromium import ARGUMENTS, find_chromium
from tests.support.databases import DATABASE_KINDS, Databases, MariaDbServer, PostgresServer, Prepare, SqliteDatabases
from tests.support.polling import poll
from tests.support.processes import Processes, Run
from tests.support.servers import Server, ServerMissing, ValkeyServer, skip_or_fail
from tests.support.single_writer import Watch

# The time of an example depends more on the machine than on the code.
hypothesis.settings.register_profile("aijobs", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("aijobs")


@pytest.fixture(scope="session", autouse=True)
def run() -> Iterator[Run]:
    """This test process; set up first and torn down last, when no process that it started may be left."""
    with pytest.MonkeyPatch.context() as environment:
        for name in list(os.environ):
            if name.startswith("AIJOBS_") or name == "DEEPSEEK_API_KEY":
                environment.delenv(name)
        this_run = Run()
        yield this_run
        try:
            poll(lambda: not this_run.leftovers(), timeout=5, what="all processes ended")
        except AssertionError:
            left = this_run.leftovers()
            assert not left, "processes outlived their tests:\n" + "\n".join(left)
        finally:
            this_run.close()


@cache
def _prompts_of(*folders: Path) -> PromptTemplates:
    prompts = PromptTemplates(folders)
    prompts.exists = cache(prompts.exists)  # type: ignore[method-assign]
    return prompts


@cache
def _entry_points(group: str, _path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=group)


@pytest.fixture(scope="session", autouse=True)
def _read_once() -> Iterator[None]:
    """Read entry points and prompts once for all tests, because that takes most of the time of building services."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (discovery, plugins):
            patch.setattr(module, "entry_points", lambda group: _entry_points(group, tuple(sys.path)))
        patch.setattr(services, "PromptTemplates", lambda folders: _prompts_of(*folders))
        yield


@pytest.fixture(scope="session")
def _watch() -> Iterator[Watch]:
    watch = Watch()
    watch.install()
    yield watch
    watch.remove()


@pytest.fixture(autouse=True)
def single_writer(_watch: Watch) -> Iterator[Watch]:
    """Fail a test during which other code than the lifecycle repository wrote a job's state.

    `single_writer.take()` is only for tests of this fixture.
    """
    yield _watch
    caught = _watch.take()
    assert not caught, "\n".join(caught)


def _running(build: Callable[[], Server]) -> Iterator[Any]:
    try:
        server = build()
    except ServerMissing as missing:
        skip_or_fail(missing)
    else:
        server.start()
        yield server
        server.stop()


# --- broker -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def valkey(run: Run) -> Iterator[ValkeyServer]:
    """The shared broker of this test process. `redis_url` makes sure that it is running and empty."""
    yield from _running(lambda: ValkeyServer(run))


@pytest.fixture
def redis_url(valkey: ValkeyServer) -> str:
    """The address of the shared broker, running and empty."""
    valkey.ensure_running()
    valkey.flush()
    return valkey.url


@pytest.fixture
def start_valkey(run: Run) -> Iterator[Callable[..., ValkeyServer]]:
    """`start_valkey(*config_lines)` starts a broker for one test, with lines of valkey.conf (ACL, memory)."""
    servers: list[ValkeyServer] = []

    def start(*config: str) -> ValkeyServer:
        server = ValkeyServer(run, config)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        if server.program is not None:
            server.kill()


# --- databases --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def sqlite(run: Run) -> SqliteDatabases:
    """SQLite files."""
    return SqliteDatabases(run)


@pytest.fixture(scope="session")
def postgres(run: Run) -> Iterator[PostgresServer]:
    """The PostgreSQL of this test process."""
    yield from _running(lambda: PostgresServer(run))


@pytest.fixture(scope="session")
def mariadb(run: Run) -> Iterator[MariaDbServer]:
    """The MariaDB of this test process."""
    yield from _running(lambda: MariaDbServer(run))


@pytest.fixture(params=DATABASE_KINDS)
def database_server(request: pytest.FixtureRequest) -> Databases:
    """Each database in turn: the test runs three times. `.kind` is its name."""
    fixture = {"sqlite": "sqlite", "postgresql": "postgres", "mariadb": "mariadb"}[request.param]
    server = request.getfixturevalue(fixture)
    if isinstance(server, Server):
        server.ensure_running()
    return server


def _create_and_drop(server: Databases) -> Iterator[Callable[..., str]]:
    urls: list[str] = []

    def create(prepare: Prepare | None = None) -> str:
        urls.append(server.create_database(prepare))
        return urls[-1]

    yield create
    if isinstance(server, Server):
        server.ensure_running()
    for url in urls:
        server.drop_database(url)


@pytest.fixture
def create_database(database_server: Databases) -> Iterator[Callable[..., str]]:
    """`create_database(prepare=None) -> url`: databases of each kind in turn, dropped with the test.

    `prepare`, a function of a module, fills the database at the given URL. The result is kept as a template, so that
    it takes its time only once.
    """
    yield from _create_and_drop(database_server)


@pytest.fixture
def database_url(create_database: Callable[..., str]) -> str:
    """A fresh, empty database of each kind in turn."""
    return create_database()


@pytest.fixture
def create_sqlite_database(sqlite: SqliteDatabases) -> Iterator[Callable[..., str]]:
    """Like `create_database`, for SQLite only."""
    yield from _create_and_drop(sqlite)


@pytest.fixture
def sqlite_url(create_sqlite_database: Callable[..., str]) -> str:
    """A fresh, empty SQLite database, for tests that don't depend on the kind of database."""
    return create_sqlite_database()


# --- processes --------------------------------------------------------------------------------------------


@pytest.fixture
def processes(run: Run) -> Iterator[Processes]:
    """`processes.spawn(command, env=…, cwd=…, name=…) -> Program`; all are ended with the test."""
    started = Processes(run)
    yield started
    started.stop_all()


def pytest_collection_finish() -> None:
    """Otherwise the garbage collector takes a tenth of the time, scanning thousands of tests and modules."""
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the output of its programs to the report of a failed test."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        started = item.funcargs.get("processes")
        for program in started.programs if isinstance(started, Processes) else ():
            state = "running" if program.is_running else f"ended with {program.returncode}"
            report.sections.append((f"{program.name} ({program.pid}, {state})", program.output[-20_000:]))
    return report


# --- browser ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def playwright(run: Run) -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """One headless Chromium for each test process."""
    try:
        path = find_chromium(playwright)
    except ServerMissing as missing:
        skip_or_fail(missing)
    else:
        started = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """`new_page(**options) -> Page`: a page in a new context, with options such as `locale`."""
    contexts = []

    def open_page(**options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        return context.new_page()

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    """A page without cookies and storage."""
    return new_page()
