"""Engines: our isolation, time zone, waits and JSON on any of the three databases."""

from __future__ import annotations

import atexit
import json
import time
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any
from weakref import WeakSet

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, NoSuchModuleError
from sqlalchemy.util import asbool

from aijobs.errors import SettingsError
from aijobs.forks import leave_behind, renew_in_child
from aijobs.machine import create_private

IDLE_TRANSACTION_S = 60
"""A server ends a transaction whose client has been silent for so long, and frees its rows: a machine that vanished or
stands still in the middle of one holds up nobody past a lease's end. Ours never wait for anything but the database."""

LOCK_WAIT_S = 10
"""How long a statement waits for a row that another transaction holds, before its unit of work begins again."""
ANSWER_S = 30
"""How long a server that says nothing is believed to be there: one whose machine is gone, or stands still, closes no
connection, and TCP alone gives up after a quarter of an hour. Beyond the wait for a row, which is no silence."""

FRESH_S = 0.5
"""So long after it came back to the pool a connection is believed to be there (HikariCP's window too)."""
_LEFT_AT = "aijobs_left_at"

SMALLEST_PACKET = 1024 * 1024
"""The least `max_allowed_packet` of MariaDB that we start with: the driver puts many rows into such a statement."""
_PACKET_MARGIN = 2
"""The server refuses a statement of one byte less than `max_allowed_packet`: the command's own byte counts."""
TOO_LARGE = 1153
"""MariaDB's error for a statement beyond `max_allowed_packet`."""

_STALE = "RevalidateCachedQuery"
"""Where PostgreSQL (its plancache.c) finds that a prepared statement's columns are no longer those of the table: the
error's code is used for much else, and its text is in the server's language."""

_WRITES = "aijobs_writes"
WRITING = {_WRITES: True}
"""Execution options of a connection whose transactions write from their start (BEGIN IMMEDIATE on SQLite)."""


def build_engine(url: str | URL, *, pool_size: int = 10, patient: bool = False) -> Engine:
    """An engine with our isolation, time zone, waits and JSON on any of the three databases.

    `patient` is for changes of the schema, which may wait for one another and take their time. `SettingsError` for an
    address that SQLAlchemy or the driver can't read.
    """
    try:
        engine = _build(make_url(url), pool_size, patient)
    except (ArgumentError, NoSuchModuleError, ImportError, ValueError):
        # Their texts quote the address, password and all.
        raise SettingsError("AIJOBS_DATABASE_URL can't be read: see the forms in docs/production.md") from None
    _check_query(engine.url, engine.dialect.driver, _driver_options(engine))
    return engine


def _build(parsed: URL, pool_size: int, patient: bool) -> Engine:
    options: dict[str, Any] = {
        "json_serializer": lambda value: json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")),
        "hide_parameters": True,
        "pool_size": pool_size,
        "max_overflow": 10,
        "pool_use_lifo": True,
        "pool_timeout": 10,
    }
    if parsed.get_backend_name() == "sqlite":
        _check_query(parsed, "SQLite", _SQLITE | _SQLITE_URI if "uri" in parsed.query else _SQLITE)
        engine = create_engine(parsed, **options, connect_args={"timeout": 5})
        _prepare_sqlite(engine)
        _files.add(engine)
        renew_in_child(engine, _empty_pool)
        return engine
    options["pool_recycle"] = 1800
    if parsed.get_backend_name() == "postgresql":
        engine = create_engine(parsed, **options, connect_args=_POSTGRESQL_ARGUMENTS)
        _prepare_postgresql(engine, patient)
        _renew_where_stale(engine)
    else:
        arguments = _mysql_arguments(parsed, patient)
        engine = create_engine(parsed, **options, isolation_level="READ COMMITTED", connect_args=arguments)
        if parsed.get_driver_name() == "pymysql":
            _bound_statements(engine)
    _ping_idle(engine)
    renew_in_child(engine, _empty_pool)
    return engine


def _check_query(url: URL, driver: str, known: frozenset[str]) -> None:
    """`SettingsError` for an option behind `?` that the driver doesn't know: it would raise at the first connection, or
    be ignored by SQLite.
    """
    if known and (unknown := sorted(set(url.query) - known)):
        raise SettingsError(f"AIJOBS_DATABASE_URL: {', '.join(unknown)} is no option of {driver}; leave it out")


def _driver_options(engine: Engine) -> frozenset[str]:
    if engine.dialect.driver == "psycopg":
        return frozenset(each.keyword.decode() for each in engine.dialect.loaded_dbapi.pq.Conninfo.get_defaults())
    if engine.dialect.driver == "pymysql":
        return _PYMYSQL_EXTRA | frozenset(signature(engine.dialect.loaded_dbapi.connections.Connection).parameters)
    return frozenset()


_SQLITE = frozenset("uri timeout isolation_level detect_types check_same_thread cached_statements".split())
"""What SQLAlchemy takes from the address for `sqlite3.connect`."""
_SQLITE_URI = frozenset("cache immutable mode modeof nolock psow vfs".split())
"""What SQLite takes besides from an address with `uri=true`."""

_PYMYSQL_EXTRA = frozenset({"ssl_capath", "ssl_cipher", "ssl_check_hostname"})
"""What SQLAlchemy takes from the address for the driver."""


def _empty_pool(engine: Engine) -> None:
    """Give the child of a fork a pool of its own: the parent works with the connections of the inherited one."""
    leave_behind(engine.pool)
    engine.dispose(close=False)


def _bound_statements(engine: Engine) -> None:
    """Refuse a statement that the server doesn't take before it is sent.

    The server would answer by cutting the connection, which looks like an outage and would be tried again.
    """
    driver: Any = engine.dialect.loaded_dbapi

    class BoundedCursor(driver.cursors.Cursor):
        def execute(self, query: Any, args: Any = None) -> Any:
            written, longest = self.mogrify(query, args), self.connection.longest
            # Characters first: hardly any statement is so long that its bytes have to be counted.
            if 4 * len(written) > longest and len(_bytes(written, self.connection.encoding)) > longest:
                raise driver.err.DataError(TOO_LARGE, "the statement is longer than the server takes", longest)
            return super().execute(written)

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@max_allowed_packet")
            connection.longest = int(cursor.fetchone()[0]) - _PACKET_MARGIN
        connection.cursorclass = BoundedCursor


def _bytes(statement: Any, encoding: str) -> bytes:
    return statement.encode(encoding, "surrogateescape") if isinstance(statement, str) else statement


def check_packet(engine: Engine) -> None:
    """`SettingsError` if the server takes statements of less than 1 MiB, which answers and notes may have."""
    if engine.dialect.name not in ("mysql", "mariadb"):
        return
    with engine.connect() as connection:
        packet = int(connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one())
    if packet < SMALLEST_PACKET:
        raise SettingsError(
            f"the database's max_allowed_packet is {packet} bytes: set it to {SMALLEST_PACKET} (1M) or more"
        )


def _ping_idle(engine: Engine) -> None:
    """Ask the server whether it knows a pooled connection before it is used, unless it came back just now.

    One that was cut within that moment is found by its first statement: a unit of work begins again, a reader fails as
    if it had been cut a moment later. All of the pool goes then, so that it is one a process.
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


def _renew_where_stale(engine: Engine) -> None:
    """Take a connection for cut whose prepared statements are older than a change of the schema: a new one has none.

    The driver prepares a statement that comes often, which saves the server a fourth of its work for a job.
    """

    @event.listens_for(engine, "handle_error")
    def failed(context: ExceptionContext) -> None:
        diagnosis = getattr(context.original_exception, "diag", None)
        if diagnosis is not None and diagnosis.source_function == _STALE:
            context.is_disconnect = True


_POSTGRESQL_ARGUMENTS = {
    "connect_timeout": 5,
    # A statement may take as long as it likes while the server's machine still answers for it; what was sent and
    # isn't acknowledged, or is asked for and doesn't come, ends the connection.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": ANSWER_S * 1000,
}


def _prepare_postgresql(engine: Engine, patient: bool) -> None:
    """Set the session's parameters with one statement per new connection.

    As start-up parameters they would cost nothing, but PgBouncer refuses connections that bring `options`.
    """
    session = {
        "timezone": "UTC",
        "idle_in_transaction_session_timeout": f"{IDLE_TRANSACTION_S}s",
        # A generic plan is kept, and was made while the table was small: with a backlog it would read all of it.
        "plan_cache_mode": "force_custom_plan",
    }
    if not patient:
        session["lock_timeout"] = f"{LOCK_WAIT_S}s"
    statement = "SELECT " + ", ".join(f"set_config('{name}', '{value}', false)" for name, value in session.items())

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.autocommit = True  # In a transaction they would be undone with it.
        connection.execute(statement)
        connection.autocommit = False


def _mysql_arguments(url: URL, patient: bool) -> dict[str, Any]:
    silence = {} if patient else {"read_timeout": ANSWER_S, "write_timeout": ANSWER_S}
    return {
        **_tls(url),
        "charset": "utf8mb4",
        # The part in the comment is for MariaDB alone: MySQL has no such variable.
        "init_command": f"SET time_zone='+00:00', innodb_lock_wait_timeout={LOCK_WAIT_S}, sql_mode='STRICT_ALL_TABLES'"
        f" /*M! , idle_transaction_timeout={IDLE_TRANSACTION_S} */",
        "connect_timeout": 5,
        **silence,
    }


def _tls(url: URL) -> dict[str, bool]:
    """`ssl_disabled` as the address means it. To the driver any text is true, `false` too, and weightier than `ssl_ca`:
    it would speak in clear without a word."""
    said = url.query.get("ssl_disabled")
    if said is None:
        return {}
    try:
        disabled = asbool(str(said))
    except ValueError:
        raise SettingsError(f"AIJOBS_DATABASE_URL: ssl_disabled is {said!r}; it is true or false") from None
    if disabled and (asked := [key for key in url.query if key.startswith("ssl") and key != "ssl_disabled"]):
        raise SettingsError(f"AIJOBS_DATABASE_URL disables TLS, and asks for it by {', '.join(asked)}")
    return {"ssl_disabled": disabled}


_files: WeakSet[Engine] = WeakSet()
"""SQLite engines of this process."""


@atexit.register
def _close_files() -> None:
    """Close SQLite's connections when the process ends: Python itself may leave them open.

    The last one to close moves everything from `-wal` into the file.
    """
    for engine in list(_files):
        engine.dispose()


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
