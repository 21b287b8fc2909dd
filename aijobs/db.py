"""The database behind every store: engines, units of work, column types and the one clock that judges leases.

SQLite, PostgreSQL and MariaDB are equals. A unit of work is a function that may run again: `Database.write` repeats
it in a fresh session after a deadlock, a lock wait or a lost connection, and settles a COMMIT whose answer was lost
by reading.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    CursorResult,
    DateTime,
    Delete,
    Dialect,
    Engine,
    Interval,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    Update,
    bindparam,
    create_engine,
    event,
    literal,
    select,
)
from sqlalchemy.dialects.mysql import DATETIME as MYSQL_DATETIME
from sqlalchemy.dialects.mysql import LONGTEXT
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, InvalidatePoolError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker
from sqlalchemy.sql.functions import FunctionElement

from aijobs.machine import create_private

T = TypeVar("T")

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}

MARIADB_COLLATION = "utf8mb4_nopad_bin"
TABLE_OPTIONS = {
    # Both prefixes, as SQLAlchemy reads the one of the URL's scheme alone.
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("charset", "utf8mb4"), ("collate", MARIADB_COLLATION), ("engine", "InnoDB"))
}
"""What every table asks of MariaDB, so that they are alike whatever the server's defaults are."""


class Base(DeclarativeBase):
    """The root of all models."""

    metadata = MetaData(naming_convention=NAMING)
    __table_args__: Any = TABLE_OPTIONS


def _is_mysql(dialect: Dialect) -> bool:
    return dialect.name in ("mysql", "mariadb")


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC instant: timestamptz, DATETIME(6), or text with milliseconds on SQLite, which sorts as time does."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(DateTime(timezone=True))
        if _is_mysql(dialect):
            return dialect.type_descriptor(MYSQL_DATETIME(fsp=6))
        return dialect.type_descriptor(String(23))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a naive datetime: times in the database are aware")
        at = value.astimezone(UTC)
        if dialect.name == "postgresql":
            return at
        at = at.replace(tzinfo=None)
        return at if _is_mysql(dialect) else at.isoformat(sep=" ", timespec="milliseconds")

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        at = datetime.fromisoformat(value) if isinstance(value, str) else value
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


class Key(TypeDecorator[str]):
    """A text that is compared: exact in case, accent, width and trailing space on every database, ordered by bytes."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        length = cast(String, self.impl_instance).length
        if dialect.name == "postgresql":
            return dialect.type_descriptor(String(length, collation="C"))
        if _is_mysql(dialect):
            return dialect.type_descriptor(String(length, collation=MARIADB_COLLATION))
        return dialect.type_descriptor(String(length))


LongText = Text().with_variant(LONGTEXT(), "mysql", "mariadb")
"""Text of any length."""

Json = JSON(none_as_null=True)
"""A JSON document as text; never PostgreSQL's jsonb, which reorders keys and drops duplicates."""


# --- the one clock -------------------------------------------------------------------------------------------------


class _Offset(TypeDecorator[timedelta]):
    """How far from now, in milliseconds, as each database adds it to an instant."""

    impl = Interval
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(Interval())
        return dialect.type_descriptor(BigInteger() if _is_mysql(dialect) else String())

    def process_bind_param(self, value: timedelta | None, dialect: Dialect) -> Any:
        milliseconds = round((value or timedelta()).total_seconds() * 1000)
        if dialect.name == "postgresql":
            return timedelta(milliseconds=milliseconds)
        return milliseconds * 1000 if _is_mysql(dialect) else f"{milliseconds / 1000:+.3f} seconds"


_OFFSET = _Offset()


class _DatabaseNow(FunctionElement[datetime]):
    """The database's present instant, moved by `offset`. The offset is a parameter, so that one compiled statement
    serves them all: to compile it again for each would be the dearest part of a job.
    """

    type = UtcDateTime()
    inherit_cache = True

    def __init__(self, offset: timedelta) -> None:
        super().__init__(literal(offset, _OFFSET))


@compiles(_DatabaseNow, "sqlite")
def _sqlite_now(element: _DatabaseNow, compiler: Any, **kw: Any) -> str:
    return f"strftime('%Y-%m-%d %H:%M:%f', 'now', {compiler.process(element.clauses, **kw)})"


@compiles(_DatabaseNow, "postgresql")
def _postgresql_now(element: _DatabaseNow, compiler: Any, **kw: Any) -> str:
    # Of the statement, as on the other two: one instant in all its places (a lease is 60 s, not 60 s and 1 µs), moving
    # on within a transaction (unlike now()), and stable, so that an index serves a comparison with it.
    return f"(statement_timestamp() + {compiler.process(element.clauses, **kw)})"


@compiles(_DatabaseNow, "mysql", "mariadb")
def _mysql_now(element: _DatabaseNow, compiler: Any, **kw: Any) -> str:
    return f"(UTC_TIMESTAMP(6) + INTERVAL {compiler.process(element.clauses, **kw)} MICROSECOND)"


class Clock(Protocol):
    """The port behind which leases, due times and claims are judged."""

    def now(self, offset: timedelta = timedelta()) -> ColumnElement[datetime]:
        """The present instant moved by `offset`, as an SQL expression."""
        ...


class DatabaseClock:
    """The database's own clock."""

    def now(self, offset: timedelta = timedelta()) -> ColumnElement[datetime]:
        return _database_now(offset)


@lru_cache(maxsize=128)  # Most offsets are settings, and an element is dearer than a look at the cache.
def _database_now(offset: timedelta) -> _DatabaseNow:
    return _DatabaseNow(offset)


class ManualClock:
    """A clock that stands still until it is moved: for tests. As the database's, it is read when a statement runs."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def now(self, offset: timedelta = timedelta()) -> ColumnElement[datetime]:
        return bindparam(None, callable_=lambda: self.at + offset, type_=UtcDateTime())

    def advance(self, by: timedelta) -> None:
        self.at += by


def read_clock(session: Session, clock: Clock) -> datetime:
    """The clock's present instant as a value, in the precision that this database stores."""
    at: datetime = session.execute(select(clock.now())).scalar_one()
    return at


# --- engines and units of work -------------------------------------------------------------------------------------

IDLE_TRANSACTION_S = 60
"""A server ends a transaction whose client has been silent for so long, and frees its rows: a machine that vanished or
stands still in the middle of one holds up nobody past a lease's end. Ours never wait for anything but the database."""

LOCK_WAIT_S = 10
"""How long a statement waits for a row that another transaction holds, before its unit of work begins again."""
ANSWER_S = 30
"""How long a server that says nothing is believed to be there: one whose machine is gone, or stands still, closes no
connection, and TCP alone gives up after a quarter of an hour. Beyond the wait for a row, which is no silence."""

FRESH_S = 0.5
"""So long after its last use a connection is believed to be there (HikariCP's window too)."""
_LEFT_AT = "aijobs_left_at"

_WRITES = "aijobs_writes"
WRITING = {_WRITES: True}
"""Execution options of a connection whose transactions write from their start (BEGIN IMMEDIATE on SQLite)."""
TRIES = 5
"""How often a unit of work is tried, and a lost COMMIT looked for."""
FIRST_PAUSE_S = 0.04
"""Before a unit of work is tried again; doubled each time, and shaken so that two that met do not meet again."""


class CommitUnknown(Exception):
    """The connection was lost after COMMIT was sent: what was written may or may not be there."""

    def __init__(self, cause: DBAPIError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Database:
    """One engine, sessions that read and units of work that write."""

    def __init__(self, source: str | Engine, *, pool_size: int = 10) -> None:
        """`source`: a URL, or an engine that `build_engine` made."""
        self.engine = build_engine(source, pool_size=pool_size) if isinstance(source, str) else source
        self._read = sessionmaker(_for_reading(self.engine), expire_on_commit=False)
        self._write = sessionmaker(self.engine.execution_options(**{_WRITES: True}), expire_on_commit=False)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that reads and never writes; rolled back at the end."""
        with self._read() as session:
            yield session

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """One write transaction, not repeated: for callers that repeat themselves, and for tests."""
        with self._write() as session, session.begin():
            yield session

    def write(
        self, work: Callable[[Session], T], settle: Callable[[Session], T | None] | None = None, *, tries: int = TRIES
    ) -> T:
        """Run `work` in a write transaction and commit it; up to `tries` times where the database asks for it.

        `work` may run again from the start in a fresh session, so it changes nothing but the database. Where the
        answer to COMMIT was lost, `settle` reads whether it took effect: a value is the result, None means that it
        didn't and `work` runs again. Without `settle`, `work` must itself be safe to repeat.
        """
        lost = False
        for attempt in range(1, tries + 1):
            try:
                return self._once(work)
            except Exception as error:
                lost = lost or isinstance(error, CommitUnknown)
                if isinstance(error, CommitUnknown):
                    _pause(attempt)
                # Also where another error follows: a COMMIT that was only late may have taken effect by now, and be
                # the very thing that this try met.
                if lost and settle and (settled := self._settled(settle)) is not None:
                    return settled
                if isinstance(error, CommitUnknown):
                    if attempt == tries:
                        raise error.cause from error
                elif attempt == tries or not _worth_repeating(error):
                    raise
                else:
                    _pause(attempt)
        raise AssertionError("unreachable: the last try returns or raises")

    def _settled(self, settle: Callable[[Session], T | None]) -> T | None:
        """What `settle` reads, once the database can be asked: as often as a write is tried."""
        for attempt in range(1, TRIES):
            try:
                return self._look(settle)
            except DBAPIError:
                _pause(attempt)
        return self._look(settle)

    def _look(self, settle: Callable[[Session], T | None]) -> T | None:
        with self._read() as session:
            return settle(session)

    def _once(self, work: Callable[[Session], T]) -> T:
        with self._write() as session:
            result = work(session)
            session.flush()
            try:
                session.commit()
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise CommitUnknown(error) from error
                # A COMMIT that failed (SQLite: busy, disk full) may leave its transaction open, which would come back
                # from the pool with the connection.
                session.invalidate()
                raise
            return result

    def dispose(self) -> None:
        """Close the pool's connections."""
        self.engine.dispose()


def _for_reading(engine: Engine) -> Engine:
    """The same engine for sessions that only read. PostgreSQL needs no transaction for that, which saves two round
    trips: at READ COMMITTED each statement sees what is committed anyway."""
    if engine.dialect.name == "postgresql":
        return engine.execution_options(isolation_level="AUTOCOMMIT")
    return engine


def change_rows(session: Session, statement: Update | Delete) -> int:
    """Run an UPDATE or DELETE and say how many rows it found (matched, also where nothing in them changed).

    Objects that the session holds are not brought up to date: read again what is needed.
    """
    result = session.execute(statement.execution_options(synchronize_session=False))
    return cast("CursorResult[Any]", result).rowcount


def insert_if_absent(session: Session, model: type[Base], key: str, **values: Any) -> None:
    """Insert a row; nothing happens where one with its value of the unique column `key` is there, or comes first."""
    table, dialect = cast(Table, model.__table__), session.get_bind().dialect
    if _is_mysql(dialect):
        # Set to itself, and not INSERT IGNORE, which would let a text that is too long pass as well.
        mysql = mysql_insert(table).values(**values)
        session.execute(mysql.on_duplicate_key_update({key: table.c[key]}))
    elif dialect.name == "postgresql":
        session.execute(postgresql_insert(table).values(**values).on_conflict_do_nothing(index_elements=[key]))
    else:
        session.execute(sqlite_insert(table).values(**values).on_conflict_do_nothing(index_elements=[key]))


def savepoint(session: Session) -> Any:
    """A SAVEPOINT as a context manager, rolled back alone where its block raises."""
    return session.begin_nested()


# Lock wait timeout; deadlock; record has changed since last read; and no such savepoint, which is how a deadlock within
# one looks, as it rolled back the whole transaction before the savepoint's turn.
_MYSQL_REPEAT = frozenset({1205, 1213, 1020, 1305})
_POSTGRES_REPEAT = frozenset({"40001", "40P01", "55P03"})  # serialization failure, deadlock, lock not available


def _pause(attempt: int) -> None:
    """Wait before the next try, longer each time, and not as long as whoever we met."""
    time.sleep(random.uniform(0.5, 1.5) * FIRST_PAUSE_S * 2 ** (attempt - 1))


def _worth_repeating(error: Exception) -> bool:
    """Whether the database says that the same work may succeed at another try."""
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    original = error.orig
    if getattr(original, "sqlstate", None) in _POSTGRES_REPEAT:
        return True
    arguments = getattr(original, "args", ()) or ("",)
    return arguments[0] in _MYSQL_REPEAT or "database is locked" in str(arguments[0])


def build_engine(url: str | URL, *, pool_size: int = 10, patient: bool = False) -> Engine:
    """An engine with our isolation, time zone, waits and JSON on any of the three databases.

    `patient` is for changes of the schema, which may wait for one another and take their time.
    """
    parsed = make_url(url)
    options: dict[str, Any] = {
        "json_serializer": lambda value: json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")),
        "hide_parameters": True,
        "pool_size": pool_size,
        "max_overflow": 10,
        "pool_timeout": 10,
    }
    if parsed.get_backend_name() == "sqlite":
        engine = create_engine(parsed, **options, connect_args={"timeout": 5})
        _prepare_sqlite(engine)
        return engine
    options["pool_recycle"] = 1800
    if parsed.get_backend_name() == "postgresql":
        options["connect_args"] = _postgresql_arguments(patient)
    else:
        options |= {"isolation_level": "READ COMMITTED", "connect_args": _mysql_arguments(patient)}
    engine = create_engine(parsed, **options)
    _ping_idle(engine)
    return engine


def _ping_idle(engine: Engine) -> None:
    """Ask a server whether it knows a pooled connection before it is used, unless it answered just now: a unit of work
    that meets one which was cut within that moment begins again.
    """

    @event.listens_for(engine, "checkin")
    def left(_connection: Any, record: Any) -> None:
        record.info[_LEFT_AT] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def taken(connection: Any, record: Any, _proxy: Any) -> None:
        left_at = record.info.get(_LEFT_AT)
        if left_at is None or time.monotonic() - left_at < FRESH_S:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error  # It and those like it go, and the pool makes new ones.


def _postgresql_arguments(patient: bool) -> dict[str, Any]:
    session = {"timezone": "UTC", "idle_in_transaction_session_timeout": f"{IDLE_TRANSACTION_S}s"}
    if not patient:
        session["lock_timeout"] = f"{LOCK_WAIT_S}s"
    return {
        "options": " ".join(f"-c {name}={value}" for name, value in session.items()),
        "connect_timeout": 5,
        # A statement may take as long as it likes while the server's machine still answers for it; what was sent and
        # isn't acknowledged, or is asked for and doesn't come, ends the connection.
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": ANSWER_S * 1000,
    }


def _mysql_arguments(patient: bool) -> dict[str, Any]:
    silence = {} if patient else {"read_timeout": ANSWER_S, "write_timeout": ANSWER_S}
    return {
        "charset": "utf8mb4",
        # The part in the comment is for MariaDB alone: MySQL has no such variable.
        "init_command": f"SET time_zone='+00:00', innodb_lock_wait_timeout={LOCK_WAIT_S}, sql_mode='STRICT_ALL_TABLES'"
        f" /*M! , idle_write_transaction_timeout={IDLE_TRANSACTION_S} */",
        "connect_timeout": 5,
        **silence,
    }


def _prepare_sqlite(engine: Engine) -> None:
    """WAL and full sync; BEGIN IMMEDIATE for units of work, so that none fails at upgrading a read lock."""

    @event.listens_for(engine, "do_connect")
    def private(_dialect: Any, _record: Any, arguments: Any, _parameters: Any) -> None:
        # Learners' notes and operators' password hashes are in it: made here, so that nobody else may read it. SQLite
        # gives its companions, -wal and -shm, the rights of the file itself. One that is there is not touched: to
        # close any descriptor of it would drop the locks that this process's connections hold.
        name = str(arguments[0]) if arguments else ""
        if name and name != ":memory:" and not name.startswith("file:") and not Path(name).exists():
            with suppress(OSError):  # What can't be made is told by the connection itself.
                create_private(Path(name), "")

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # The driver begins nothing by itself; `begun` below does.
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        writes = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
