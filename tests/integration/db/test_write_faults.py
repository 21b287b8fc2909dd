"""A database that answers but refuses writes, read-only or full: the cause is named, and recovery is noticed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pymysql
import pytest
from sqlalchemy import event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from aijobs.causes import cause_of, stops_writes
from aijobs.db import database as db
from aijobs.db.database import Database
from aijobs.upkeep.pass_log import probe_writes
from tests.support.databases import LIMITED, Databases, MariaDbServer, PostgresServer
from tests.support.jobs import Kit, open_kit
from tests.support.rows import prepare_database


@contextmanager
def read_only_postgres(server: PostgresServer, name: str) -> Iterator[None]:
    with server.connect() as admin:
        admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        yield
        admin.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")


@contextmanager
def read_only_mariadb(server: MariaDbServer) -> Iterator[None]:
    """Do what `--read-only` does; it affects only users without the right to write all the same."""
    with server.connect() as admin, admin.cursor() as cursor:
        cursor.execute("SET GLOBAL read_only = 1")
        try:
            yield
        finally:
            cursor.execute("SET GLOBAL read_only = 0")


@contextmanager
def read_only_sqlite(database: Database) -> Iterator[None]:
    def connected(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA query_only=ON")

    event.listen(database.engine, "connect", connected)
    yield
    event.remove(database.engine, "connect", connected)


@pytest.fixture
def kit(database_server: Databases, create_database: Callable[..., str]) -> Iterator[Kit]:
    url = make_url(create_database(prepare_database))
    if isinstance(database_server, MariaDbServer):
        url = url.set(username=LIMITED)
    with open_kit(url.render_as_string(hide_password=False)) as kit:
        yield kit


@contextmanager
def read_only(server: Databases, kit: Kit) -> Iterator[None]:
    """Make the kit's database refuse writes on new connections."""
    name = str(kit.database.engine.url.database)
    if isinstance(server, PostgresServer):
        state = read_only_postgres(server, name)
    elif isinstance(server, MariaDbServer):
        state = read_only_mariadb(server)
    else:
        state = read_only_sqlite(kit.database)
    with state:
        kit.database.dispose()
        yield
    kit.database.dispose()


def test_read_only_database_is_named_and_its_recovery_noticed(
    database_server: Databases, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "HOLD_S", 0.0)
    probe = probe_writes(kit.clock)
    kit.new_job()
    assert kit.database.write_fault(probe) is None
    with read_only(database_server, kit):
        with pytest.raises(DBAPIError) as failed:
            kit.create()
        assert cause_of(failed.value) == "read_only"
        assert kit.database.write_fault(probe) == "read_only"
        assert kit.database.answers()
    assert kit.database.write_fault(probe) is None
    kit.new_job()


def test_process_without_writes_probes_with_a_small_write(database_server: Databases, kit: Kit) -> None:
    probe = probe_writes(kit.clock)
    with read_only(database_server, kit):
        assert Database(kit.database.engine).write_fault(probe) == "read_only"
    assert Database(kit.database.engine).write_fault(probe) is None


def test_recent_successful_write_replaces_the_probe(kit: Kit) -> None:
    kit.new_job()
    with kit.statements() as seen:
        assert kit.database.write_fault(probe_writes(kit.clock)) is None
    assert not seen


ERRORS = {
    "disk_full": [
        psycopg.errors.DiskFull("could not extend file"),
        pymysql.err.OperationalError(1021, "Disk full"),
        pymysql.err.OperationalError(1114, "The table is full"),
    ],
    "read_only": [
        psycopg.errors.ReadOnlySqlTransaction("cannot execute INSERT in a read-only transaction"),
        pymysql.err.OperationalError(1290, "running with the --read-only option"),
        pymysql.err.InternalError(1792, "Cannot execute statement in a READ ONLY transaction"),
        pymysql.err.OperationalError(1836, "Running in read-only mode"),
    ],
    "40P01": [psycopg.errors.DeadlockDetected("deadlock detected")],
    "1205": [pymysql.err.OperationalError(1205, "Lock wait timeout exceeded")],
    None: [psycopg.OperationalError("connection refused"), sqlite3.ProgrammingError("closed"), ValueError(28), None],
}


@pytest.mark.parametrize(("cause", "original"), [(cause, one) for cause, errors in ERRORS.items() for one in errors])
def test_cause_of_a_driver_error_does_not_quote_its_text(cause: str | None, original: Any) -> None:
    error: Any = SimpleNamespace(orig=original)
    found = cause_of(error)
    assert found == cause or (isinstance(original, ValueError) and found == "28")
    assert stops_writes(found) is (cause in ("disk_full", "read_only"))


def test_lasting_lock_is_no_write_fault(create_sqlite_database: Callable[..., str]) -> None:
    url = create_sqlite_database(prepare_database)
    with open_kit(url) as kit, sqlite3.connect(str(kit.database.engine.url.database)) as other:
        event.listen(kit.database.engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=1"))
        kit.database.dispose()
        other.execute("BEGIN IMMEDIATE")
        assert kit.database.write_fault(probe_writes(kit.clock)) is None
        other.rollback()
    other.close()


def test_write_refused_for_another_cause_is_a_write_fault(create_sqlite_database: Callable[..., str]) -> None:
    with open_kit(create_sqlite_database(prepare_database)) as kit:
        for change in ("INSERT", "UPDATE"):
            with kit.database.transaction() as session:
                refuse = (
                    f"CREATE TRIGGER refuse_{change} BEFORE {change} ON pass_runs BEGIN SELECT RAISE(ABORT, 'no'); END"
                )
                session.execute(text(refuse))
        assert Database(kit.database.engine).write_fault(probe_writes(kit.clock)) == "refused"
