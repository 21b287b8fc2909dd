"""The one clock: the database's own, by which leases, due times and claims are judged."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Protocol

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Dialect,
    Interval,
    Select,
    String,
    TypeDecorator,
    bindparam,
    literal,
    select,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from aijobs.db.database import Unit, UtcDateTime, connection_of, is_mysql


class _Offset(TypeDecorator[timedelta]):
    """How far from now, in milliseconds, as each database adds it to an instant."""

    impl = Interval
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(Interval())
        return dialect.type_descriptor(BigInteger() if is_mysql(dialect) else String())

    def process_bind_param(self, value: timedelta | None, dialect: Dialect) -> Any:
        milliseconds = round((value or timedelta()).total_seconds() * 1000)
        if dialect.name == "postgresql":
            return timedelta(milliseconds=milliseconds)
        return milliseconds * 1000 if is_mysql(dialect) else f"{milliseconds / 1000:+.3f} seconds"


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
        """The present instant moved by `offset`, as an SQL expression: for one offset always the same object, so that
        statements which differ in nothing else are the same.
        """
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
        self._known: dict[timedelta, ColumnElement[datetime]] = {}

    def now(self, offset: timedelta = timedelta()) -> ColumnElement[datetime]:
        now = bindparam(None, callable_=lambda: self.at + offset, type_=UtcDateTime())
        return self._known.setdefault(offset, now)

    def advance(self, by: timedelta) -> None:
        self.at += by


@lru_cache(maxsize=8)
def _read(now: ColumnElement[datetime]) -> Select[datetime]:
    return select(now)


def read_clock(unit: Unit, clock: Clock) -> datetime:
    """The clock's present instant as a value, in the precision that this database stores."""
    at: datetime = connection_of(unit).execute(_read(clock.now())).scalar_one()
    return at
