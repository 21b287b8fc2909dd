"""Servers fork after the import, and plug-ins inside a worker: no connection is shared, and no process hangs."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import literal, select

from aijobs.db.database import Database
from tests.support.databases import SERVER_FIRST
from tests.support.forking import forked
from tests.support.processes import Processes
from tests.support.rows import prepare_database

ROOT = Path(__file__).parents[2]

LOOK = """
import json, sys, threading
import psutil
import app
import aijobs.workers
from aijobs.web.factory import create_app
create_app()
process = psutil.Process()
print("FOUND " + json.dumps({
    "threads": [thread.name for thread in threading.enumerate()],
    "connections": [str(each.raddr) for each in process.net_connections("all") if each.raddr],
    "files": [file.path for file in process.open_files() if ".db" in file.path],
}))
"""


@SERVER_FIRST
def test_import_of_the_application_leaves_no_connection_open_and_no_thread(
    processes: Processes, create_database: Callable[..., str], redis_url: str, tmp_path: Path
) -> None:
    env = {
        "AIJOBS_ENV": "development",
        "AIJOBS_INSTANCE_PATH": str(tmp_path),
        "AIJOBS_DATABASE_URL": create_database(prepare_database),
        "AIJOBS_REDIS_URL": redis_url,
    }
    program = processes.spawn([sys.executable, "-c", LOOK], env=env, cwd=ROOT)
    assert program.wait(60) == 0, program.output
    (line,) = [line for line in program.output.splitlines() if line.startswith("FOUND ")]
    assert json.loads(line.removeprefix("FOUND ")) == {"threads": ["MainThread"], "connections": [], "files": []}


def test_child_of_a_process_with_a_used_pool_opens_connections_of_its_own(database_url: str) -> None:
    database = Database(database_url)

    def ask(numbers: range) -> None:
        for number in numbers:
            assert database.query(lambda session, n=number: session.execute(select(literal(n))).scalar_one()) == number

    def ask_at_once(start: int) -> None:
        asking = [threading.Thread(target=ask, args=(range(start + n, start + n + 100),)) for n in range(4)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()

    def act() -> None:
        assert database.engine.pool.checkedin() == 0  # type: ignore[attr-defined]
        ask_at_once(100_000)

    try:
        ask_at_once(0)
        assert database.engine.pool.checkedin() > 0  # type: ignore[attr-defined]
        with forked(act):
            ask_at_once(0)
    finally:
        database.dispose()
