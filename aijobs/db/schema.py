"""The version of the schema: checked at every start, raised by `upgrade` in one process at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import OperationalError

from aijobs.db.engines import build_engine
from aijobs.errors import SettingsError
from aijobs.settings import resource

REVISIONS = ("0001", "0002", "0003", "0004")
"""All migrations that this code knows, oldest first. A test compares them with `migrations/versions`."""

HEAD = REVISIONS[-1]

_UPGRADE_WAIT_S = 120
_POSTGRES_LOCK = 0x61696A6F6273  # "aijobs"


def check_schema(engine: Engine) -> None:
    """Raise `SettingsError` if the database has no schema, an older or a newer one.

    `OperationalError` if the database doesn't answer.
    """
    found = read_revision(engine)
    if found == HEAD:
        return
    if found is None:
        raise SettingsError("the database has no schema yet: run `aijobs db upgrade`")
    if found in REVISIONS:
        raise SettingsError(
            f"the database's schema is older ({found}) than this code ({HEAD}): run `aijobs db upgrade`"
        )
    raise SettingsError(
        f"the database's schema ({found}) is newer than this code ({HEAD}): install the version that made it"
    )


def read_revision(engine: Engine) -> str | None:
    """Return the revision of the database; None if it has no schema of ours."""
    if _is_missing_file(engine):
        return None
    with engine.connect() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return None
        revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        return revision


def _is_missing_file(engine: Engine) -> bool:
    """Return whether a connection would create an empty SQLite file. A read must not."""
    name = engine.url.database
    return engine.dialect.name == "sqlite" and bool(name) and name != ":memory:" and not Path(str(name)).exists()


def upgrade(engine: Engine) -> str | None:
    """Upgrade the database to `HEAD` and return the revision that it had before (None: no schema).

    Several processes may call it at once: one upgrades, the others wait. `SettingsError` if the schema is newer than
    this code.
    """
    from alembic import command
    from alembic.config import Config

    before = read_revision(engine)
    if before == HEAD:
        return before
    if before is not None and before not in REVISIONS:
        check_schema(engine)
    _make_folder(engine)
    config = Config(resource("migrations") / "alembic.ini")
    patient = build_engine(engine.url, patient=True)
    try:
        with _connect(patient) as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        patient.dispose()
    return before


def _make_folder(engine: Engine) -> None:
    if _is_missing_file(engine):
        Path(str(engine.url.database)).parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def _connect(engine: Engine) -> Iterator[Connection]:
    """Open a connection. On SQLite it waits for another process's upgrade as long as on the servers."""
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = engine.connect()
            break
        except OperationalError as error:
            # Two processes that create the file both switch it to WAL, and SQLite doesn't wait for that lock.
            if "database is locked" not in str(error.orig) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql(f"PRAGMA busy_timeout={_UPGRADE_WAIT_S * 1000}")
            connection.rollback()
        yield connection


@contextmanager
def one_upgrade_at_a_time(connection: Connection) -> Iterator[None]:
    """Hold the database's upgrade lock. On SQLite BEGIN IMMEDIATE is that lock.

    PostgreSQL's lock ends with the transaction that Alembic began. MariaDB commits at each DDL statement, so there the
    connection holds the lock. `SettingsError` if another upgrade takes longer than two minutes.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _POSTGRES_LOCK})
        yield
    elif connection.dialect.name in ("mysql", "mariadb"):
        name = {"name": f"aijobs-upgrade-{connection.engine.url.database}"[:64]}
        got = connection.execute(text(f"SELECT GET_LOCK(:name, {_UPGRADE_WAIT_S})"), name).scalar()
        connection.commit()
        if got != 1:
            raise SettingsError("another process has been upgrading this database for two minutes")
        try:
            yield
        finally:
            connection.rollback()
            connection.execute(text("SELECT RELEASE_LOCK(:name)"), name)
            connection.commit()
    else:
        yield
