"""One migrated database of each kind and one engine over it, for all tests of this process.

Wiping is faster than copying a template. A shared engine compiles each statement once; with an engine of its own, each
test would spend most of its time on compiling.
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
    """Return the URL of a migrated database of this kind with only the rows that `fill` inserts."""
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
    """Open the database at `url`, a scratch database over the shared engine.

    Event listeners that a test adds to its `Database` go with it. A test must remove changes of the dialect or the
    pool itself.
    """
    shared = next((scratch.engine for scratch in _scratch.values() if scratch.url == url), None)
    database = Database(url, pool_size=POOL_SIZE) if shared is None else Database(shared.execution_options())
    try:
        yield database
    finally:
        database.dispose()


def _wipe(engine: Engine) -> bool:
    """Delete all rows. Return False if the database doesn't exist any more."""
    try:
        with engine.begin() as connection:
            tables = Base.metadata.sorted_tables  # Read each time: a test may have imported another model.
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
    """Return one query for all tables, to save a round trip to the server for each empty table."""
    return select(*(exists(select(1).select_from(table)).label(table.name) for table in tables))
