"""One migrated database of each kind for all tests of this process, and one engine over it.

Wiping is faster than copying, and an engine compiles a statement once: with one of its own, each test would spend most
of its time on compiling the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from sqlalchemy import Connection, Engine, Select, Table, exists, select
from sqlalchemy.exc import DBAPIError

from aijobs.db.database import Base, Database
from aijobs.db.engines import build_engine
from tests.support.databases import Databases
from tests.support.rows import prepare_database

POOL_SIZE = 20


@dataclass(frozen=True)
class _Scratch:
    url: str
    engine: Engine


_scratch: dict[Databases, _Scratch] = {}


def scratch_database(server: Databases, fill: Callable[[Connection], None] | None = None) -> str:
    """A migrated database of this kind, empty but for what `fill` puts into it."""
    found = _scratch.get(server)
    if found is None or not _wipe(found.engine):
        url = server.create_database(prepare_database)
        found = _scratch[server] = _Scratch(url, build_engine(url, pool_size=POOL_SIZE))
    if fill is not None:
        with found.engine.begin() as connection:
            fill(connection)
    return found.url


@contextmanager
def open_database(url: str) -> Iterator[Database]:
    """The database at `url`. On a scratch database over the engine of all tests, in a view of this test's own: what it
    listens to goes with it. (Not so what belongs to the dialect or the pool: a test takes that away itself.)
    """
    shared = next((scratch.engine for scratch in _scratch.values() if scratch.url == url), None)
    database = Database(url, pool_size=POOL_SIZE) if shared is None else Database(shared.execution_options())
    try:
        yield database
    finally:
        database.dispose()


def _wipe(engine: Engine) -> bool:
    """Delete all rows; False where the database is not there any more."""
    try:
        with engine.begin() as connection:
            tables = Base.metadata.sorted_tables  # A model that was imported since the last look is new among them.
            filled = connection.execute(_has_rows(*tables)).mappings().one()
            for table in reversed(tables):
                if filled[table.name]:
                    connection.execute(table.delete())
    except DBAPIError:
        engine.dispose()
        return False
    return True


@cache
def _has_rows(*tables: Table) -> Select[tuple[bool, ...]]:
    """One question for all: most tables are empty, and each statement is a way to the server."""
    return select(*(exists(select(1).select_from(table)).label(table.name) for table in tables))
