"""Column types, reading sessions, and units of work on SQLite, PostgreSQL and MariaDB.

A unit of work is a function that may run again: `Database.write` repeats it in a new session after a deadlock, a lock
wait or a lost connection. If the answer to COMMIT was lost, it reads whether the commit took effect.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from sqlalchemy import (
    JSON,
    Connection,
    DateTime,
    Dialect,
    Engine,
    Executable,
    MetaData,
    Row,
    String,
    Text,
    TypeDecorator,
    select,
)
from sqlalchemy.dialects.mysql import DATETIME as MYSQL_DATETIME
from sqlalchemy.dialects.mysql import LONGTEXT
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker

from aijobs.causes import REFUSED, cause_of, stops_writes
from aijobs.db.engines import TOO_LARGE, WRITING, build_engine
from aijobs.errors import JobError

T = TypeVar("T")

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}

MYSQL = ("mysql", "mariadb")
"""SQLAlchemy's dialects for MariaDB."""
MARIADB_COLLATION = "utf8mb4_nopad_bin"
TABLE_OPTIONS = {
    # Both prefixes: SQLAlchemy reads only the one of the URL's scheme.
    f"{dialect}_{option}": value
    for dialect in MYSQL
    for option, value in (("charset", "utf8mb4"), ("collate", MARIADB_COLLATION), ("engine", "InnoDB"))
}
"""Options of every table on MariaDB, so that the server's defaults don't matter."""


class Base(DeclarativeBase):
    """The base class of all models."""

    metadata = MetaData(naming_convention=NAMING)
    __table_args__: Any = TABLE_OPTIONS


def is_mysql(dialect: Dialect) -> bool:
    return dialect.name in MYSQL


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time: timestamptz, DATETIME(6), or on SQLite text with milliseconds, which sorts by time."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(DateTime(timezone=True))
        if is_mysql(dialect):
            return dialect.type_descriptor(MYSQL_DATETIME(fsp=6))
        return dialect.type_descriptor(String(23))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("the datetime has no time zone: times in the database are in UTC")
        at = value.astimezone(UTC)
        if dialect.name == "postgresql":
            return at
        at = at.replace(tzinfo=None)
        return at if is_mysql(dialect) else at.isoformat(sep=" ", timespec="milliseconds")

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        at = datetime.fromisoformat(value) if isinstance(value, str) else value
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


class Key(TypeDecorator[str]):
    """Text that is compared by bytes on every database: case, accents, width and trailing spaces count."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        length = cast(String, self.impl_instance).length
        if dialect.name == "postgresql":
            return dialect.type_descriptor(String(length, collation="C"))
        if is_mysql(dialect):
            return dialect.type_descriptor(String(length, collation=MARIADB_COLLATION))
        return dialect.type_descriptor(String(length))


LongText = Text().with_variant(LONGTEXT(), "mysql", "mariadb")
"""Text of any length."""

Json = JSON(none_as_null=True)
"""A JSON document as text. Not PostgreSQL's jsonb, which reorders keys and drops duplicates."""


# --- units of work --------------------------------------------------------------------------------------------------

TRIES = 5
"""Maximum tries of a unit of work, and of the reads that confirm a lost COMMIT."""
FIRST_PAUSE_S = 0.04
"""The wait before the second try. It doubles each time, with jitter, so that two workers that met don't meet again."""


PROBE_S = 30.0
"""How long a successful write proves that the database takes writes."""
HOLD_S = 30.0
"""Minimum time for which a fault is reported. On a full disk some writes succeed, in space that SQLite reuses."""

_AFTER_COMMIT = "aijobs_after_commit"

Unit = Session | Connection
"""A transaction as its statements see it. The short road of a job needs no `Session`; plug-ins and lists have one."""
Actions = Sequence[Callable[[], None]]


def after_commit(unit: Unit, action: Callable[[], None]) -> None:
    """Run `action` once the unit of work is committed; never if it is rolled back.

    It runs in the same thread, with session and connection closed, and must not raise.
    """
    unit.info.setdefault(_AFTER_COMMIT, []).append(action)


def _take_actions(unit: Unit) -> Actions:
    actions: Actions = unit.info.pop(_AFTER_COMMIT, ())
    return actions


def _run(actions: Actions) -> None:
    for action in actions:
        action()


class CommitUnknown(Exception):
    """The connection was lost after COMMIT was sent: what was written may or may not be there."""

    def __init__(self, cause: DBAPIError, actions: Actions = ()) -> None:
        """`actions`: what is to run if it turns out that the commit took effect."""
        super().__init__(str(cause))
        self.cause, self.actions = cause, actions


class StatementTooLarge(JobError):
    """A statement has more bytes than the server takes (`longest`). No repeat helps, and nothing was sent."""

    def __init__(self, longest: int) -> None:
        super().__init__(
            "INTERNAL_CONFIG", f"the database takes statements of at most {longest} bytes: raise max_allowed_packet"
        )
        self.longest = longest


class Database:
    """One engine, sessions that read and units of work that write."""

    def __init__(self, source: str | Engine, *, pool_size: int = 10) -> None:
        """`source`: a URL, or an engine from `build_engine`."""
        self.engine = build_engine(source, pool_size=pool_size) if isinstance(source, str) else source
        self._reading = _for_reading(self.engine)
        self._read = sessionmaker(self._reading, autoflush=False, expire_on_commit=False)
        self._writing = self.engine.execution_options(**WRITING)
        self._write = sessionmaker(self._writing, expire_on_commit=False)
        self.joins_statements = self.engine.dialect.name == "postgresql"
        """Several changes can be one statement (data-modifying WITH)."""
        self._wrote_at = self._failed_at = -math.inf
        self._fault: str | None = None

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session for reading. It flushes and commits nothing."""
        with self._read() as session:
            yield session

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Open one write transaction, which isn't repeated: for callers with a loop of their own, and for tests."""
        with self._write() as session, session.begin():
            yield session
        _run(_take_actions(session))

    def write(
        self, work: Callable[[Session], T], confirm: Callable[[Session], T | None] | None = None, *, tries: int = TRIES
    ) -> T:
        """Run `work` in a write transaction and commit it, with up to `tries` tries if the database asks for repeats.

        `work` may run again from the start in a new session, so it must change nothing but the database. If the answer
        to COMMIT was lost, `confirm` reads whether the commit took effect: a value is the result; None means that it
        didn't, and `work` runs again. Without `confirm`, `work` must itself be safe to repeat. `StatementTooLarge` if
        the server refuses a statement because of its size.
        """
        return self._repeat(self._write, work, confirm, tries)

    def transact(
        self,
        work: Callable[[Connection], T],
        confirm: Callable[[Session], T | None] | None = None,
        *,
        tries: int = TRIES,
        alone: bool = False,
    ) -> T:
        """Do the same on a bare connection, without the cost of a session. `alone`: `work` is a single statement, sent
        without BEGIN and COMMIT where `joins_statements`.
        """
        alone = alone and self.joins_statements
        begin = self._reading.connect if alone else self._writing.connect
        return self._repeat(begin, work, confirm, tries, alone)

    def _repeat(
        self,
        begin: Callable[[], Any],
        work: Callable[[Any], T],
        confirm: Callable[[Session], T | None] | None,
        tries: int,
        alone: bool = False,
    ) -> T:
        lost, lost_actions = False, cast(Actions, ())
        for attempt in range(1, tries + 1):
            try:
                result, actions = self._once(begin, work, alone)
            except Exception as error:
                self._note_fault(error)
                if isinstance(error, CommitUnknown):
                    lost, lost_actions = True, error.actions
                    _pause(attempt)
                # After another error too: the late COMMIT of an earlier try may be what this try conflicted with.
                if lost and confirm and (confirmed := self._confirm(confirm)) is not None:
                    _run(lost_actions)
                    return confirmed
                if isinstance(error, CommitUnknown):
                    if attempt == tries:
                        raise error.cause from error
                elif attempt == tries or not _worth_repeating(error):
                    raise
                else:
                    _pause(attempt)
            else:
                self._note_success()
                _run(actions)
                return result
        raise AssertionError("unreachable: the last try returns or raises")

    def write_fault(self, probe: Callable[[Session], object]) -> str | None:
        """Return why this process can't write now (`disk_full`, `read_only`, otherwise `refused`); None if it can.

        `probe` is a small write. It runs if this process hasn't written for 30 s, and finds out when a fault is over.
        """
        now = time.monotonic()
        last = self._failed_at if self._fault else self._wrote_at
        if now - last >= (HOLD_S if self._fault else PROBE_S):
            try:
                self.write(probe, tries=1)
            except DBAPIError as error:
                # A lock wait or a lost connection doesn't mean that writes are refused.
                if not (self._fault or error.connection_invalidated or _worth_repeating(error)):
                    return REFUSED
        return self._fault

    def _note_success(self) -> None:
        self._wrote_at = time.monotonic()
        if self._wrote_at - self._failed_at >= HOLD_S:
            self._fault = None

    def _note_fault(self, error: BaseException) -> None:
        cause = cause_of(error)
        if stops_writes(cause):
            self._fault, self._failed_at = cause, time.monotonic()

    def rows(self, statement: Executable, of: Mapping[str, Any]) -> Sequence[Row[Any]]:
        """Return the rows of one SELECT with its parameters. Once more if the connection turned out to be cut."""
        try:
            return self._rows(statement, of)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            return self._rows(statement, of)

    def _rows(self, statement: Executable, of: Mapping[str, Any]) -> Sequence[Row[Any]]:
        with self._reading.connect() as connection:
            return connection.execute(statement, of).all()

    def query(self, work: Callable[[Session], T]) -> T:
        """Return what `work` reads in a session. Read once more if the connection turned out to be cut."""
        try:
            return self._query(work)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            return self._query(work)

    def answers(self) -> bool:
        """Return whether the database answers a query now."""
        try:
            self.query(lambda session: session.execute(select(1)))
        except SQLAlchemyError:
            return False
        return True

    def _confirm(self, confirm: Callable[[Session], T | None]) -> T | None:
        """Return what `confirm` reads. While the database is away, try as often as a write is tried."""
        for attempt in range(1, TRIES):
            try:
                return self._query(confirm)
            except DBAPIError:
                _pause(attempt)
        return self._query(confirm)

    def _query(self, work: Callable[[Session], T]) -> T:
        with self._read() as session:
            return work(session)

    def _once(self, begin: Callable[[], Any], work: Callable[[Any], T], alone: bool) -> tuple[T, Actions]:
        """Run `work` in the session or connection that `begin` opens, and commit it."""
        with begin() as unit:
            _take_actions(unit)  # Of a transaction that was rolled back: the pool gives a connection's dict again.
            try:
                result = work(unit)
                if isinstance(unit, Session):
                    unit.flush()
            except DBAPIError as error:
                if alone and error.connection_invalidated:
                    raise CommitUnknown(error) from error
                _raise_if_too_large(error)
                raise
            actions = _take_actions(unit)
            if alone:
                return result, actions
            try:
                unit.commit()
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise CommitUnknown(error, actions) from error
                # A COMMIT that failed (SQLite: busy, disk full) may leave its transaction open, which would come back
                # from the pool with the connection.
                unit.invalidate()
                raise
            return result, actions

    def dispose(self) -> None:
        """Close the pool's connections."""
        self.engine.dispose()


def _raise_if_too_large(error: DBAPIError) -> None:
    arguments: tuple[Any, ...] = getattr(error.orig, "args", ())
    if len(arguments) == 3 and arguments[0] == TOO_LARGE:
        raise StatementTooLarge(arguments[2]) from None  # Not chained: the driver's error holds the statement.


def _for_reading(engine: Engine) -> Engine:
    """Return the engine for sessions that only read.

    On PostgreSQL they have no transaction: this saves two round trips and delays no vacuum. At READ COMMITTED each
    statement has a snapshot of its own anyway.
    """
    if engine.dialect.name == "postgresql":
        return engine.execution_options(isolation_level="AUTOCOMMIT")
    return engine


def connection_of(unit: Unit) -> Connection:
    """Return the connection of a transaction, after flushing its session's objects if it has one."""
    if isinstance(unit, Connection):
        return unit
    if unit.autoflush:
        unit.flush()
    return unit.connection()


@contextmanager
def session_on(connection: Connection) -> Iterator[Session]:
    """A session in the transaction of `connection`, for code that is used to one. What it holds is flushed at the end.

    Its commit and its end leave the transaction open; its rollback rolls all of it back.
    """
    with Session(connection, join_transaction_mode="rollback_only") as session:
        yield session
        session.flush()


def savepoint(session: Session) -> Any:
    """Open a SAVEPOINT as a context manager. If the block raises, only its changes are rolled back."""
    return session.begin_nested()


# Lock wait timeout; deadlock; record has changed since last read; no such savepoint: a deadlock rolls back the whole
# transaction, and the savepoint with it.
_MYSQL_REPEAT = frozenset({1205, 1213, 1020, 1305})
_POSTGRES_REPEAT = frozenset({"40001", "40P01", "55P03"})  # serialization failure, deadlock, lock not available


def _pause(attempt: int) -> None:
    """Wait before the next try, longer each time, with jitter."""
    time.sleep(random.uniform(0.5, 1.5) * FIRST_PAUSE_S * 2 ** (attempt - 1))


def _worth_repeating(error: Exception) -> bool:
    """Return whether the same work may succeed if it is tried again, by the database's error."""
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    original = error.orig
    if getattr(original, "sqlstate", None) in _POSTGRES_REPEAT:
        return True
    arguments = getattr(original, "args", ()) or ("",)
    return arguments[0] in _MYSQL_REPEAT or "database is locked" in str(arguments[0])
