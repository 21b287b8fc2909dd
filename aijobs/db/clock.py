"""The database's clock. Leases, due times and claims are compared with it alone."""

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
    """An offset from now, in the form that each database adds to a time."""

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
    """The database's time now, plus `offset`. The offset is a parameter, so that one compiled statement serves all."""

    type = UtcDateTime()
    inherit_cache = True

    def __init__(self, offset: timedelta) -> None:
        super().__init__(literal(offset, _OFFSET))


@compiles(_DatabaseNow, "sqlite")
def _sqlite_now(element: _DatabaseNow, compiler: Any, **kw: Any) -> str:
    return f"strftime('%Y-%m-%d %H:%M:%f', 'now', {compiler.process(element.clauses, **kw)})"


@compiles(_DatabaseNow, "postgresql")
def _postgresql_now(element: _DatabaseNow, compiler: Any, **kw: Any) -> str:
    # The same value everywhere in a statement, as on the other databases. now() would stand still in a transaction, and
    # clock_timestamp() can't use an index.
    return f"(statement_timestamp() + {compiler.process(element.clauses, **kw)})"


@compiles(_DatabaseNow, "mysql", "mariadb")
def _mysql_now(element: _DatabaseNow, compiler: Any, **kw: Any) -> str:
    return f"(UTC_TIMESTAMP(6) + INTERVAL {compiler.process(element.clauses, **kw)} MICROSECOND)"


class Clock(Protocol):
    """The port for the time that leases, due times and claims are compared with."""

    def now(self, offset: timedelta = timedelta()) -> ColumnElement[datetime]:
        """Return the time now plus `offset` as an SQL expression. Equal offsets give the same object, which lets kept
        statements be found.
        """
        ...


class DatabaseClock:
    """The database's own clock."""

    def now(self, offset: timedelta = timedelta()) -> ColumnElement[datetime]:
        return _database_now(offset)


@lru_cache(maxsize=128)  # Most offsets are settings.
def _database_now(offset: timedelta) -> _DatabaseNow:
    return _DatabaseNow(offset)


class ManualClock:
    """A clock for tests, which stands still until it is moved. It is read when a statement runs."""

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
    """Return the clock's time now, in the precision that this database stores."""
    at: datetime = connection_of(unit).execute(_read(clock.now())).scalar_one()
    return at
