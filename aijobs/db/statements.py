"""Statements that return no objects. Each is built once and kept; only its parameters change.

Building a statement costs a worker several times more than sending it. So columns, conditions and SQL expressions (the
clock's now) are part of the kept statement, and values are parameters. The cache compares expressions by identity: a
new object for each call works too, but builds the statement each time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from sqlalchemy import (
    ClauseElement,
    ColumnElement,
    CursorResult,
    Delete,
    Executable,
    Insert,
    Row,
    Select,
    String,
    Table,
    Update,
    bindparam,
    insert,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.orm import Session

from aijobs.db.database import MYSQL, Base, Unit, connection_of

KEPT = 256
"""Maximum kept statements of each kind. A job uses a dozen; the rest is for those with an expression for one call."""

Expressions = tuple[tuple[str, ClauseElement], ...]
"""SQL expressions by column name."""


@lru_cache(KEPT)
def constant(value: str) -> ColumnElement[str]:
    """Return a text of ours as part of a statement that is kept: a parameter would be sent and planned each time."""
    if not re.fullmatch(r"[a-z_]+", value):
        raise ValueError(f"{value!r} is no constant of ours")
    return literal_column(f"'{value}'", String)


def change_rows(session: Session, statement: Update | Delete) -> int:
    """Run an UPDATE or DELETE and return the number of rows that it matched, even if nothing in them changed.

    Objects of the session aren't refreshed: read again what you need.
    """
    result = session.execute(statement.execution_options(synchronize_session=False))
    return cast("CursorResult[Any]", result).rowcount


def change_by(
    unit: Unit, model: type[Base], /, *where: ColumnElement[bool], of: Mapping[str, Any], **values: Any
) -> int:
    """Run a kept UPDATE of the rows `where`, whose `bindparam`s are in `of`, and return the number of matched rows.

    `TypeError` for an unknown column, here and in the functions below.
    """
    table = _table(model)
    expressions, plain = _apart(table, values)
    return _run(unit, _update(table, where, expressions), {**plain, **of}).rowcount


def read_rows(unit: Unit, statement: Executable, of: Mapping[str, Any]) -> CursorResult[Any]:
    """Run a SELECT of columns that its caller keeps, with the parameters `of`. No objects are built."""
    return _run(unit, statement, of)


def read_all(unit: Unit, statement: Executable, of: Mapping[str, Any]) -> Sequence[Row[Any]]:
    """Return all rows of a SELECT that is kept by its caller."""
    return _run(unit, statement, of).all()


def insert_row(unit: Unit, model: type[Base], /, **values: Any) -> None:
    """Insert one row."""
    table = _table(model)
    expressions, plain = _apart(table, values)
    _run(unit, _insert(table, expressions), plain)


def insert_rows(unit: Unit, model: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows of plain values, all for the same columns. No rows are no statement."""
    if rows:
        table = _table(model)
        _refuse_unknown(table, rows[0])
        # Mostly it is one row, and `executemany` is slower for one.
        _run(unit, _insert(table, ()), rows if len(rows) > 1 else rows[0])


def insert_together(unit: Unit, *rows: tuple[type[Base], Mapping[str, Any]], returning: str) -> Any:
    """Insert rows of different tables, in one statement where the database can, and return a column of the first.

    A value must be given for each column that has no default of the database. The column that is returned is an
    expression only where `joins_statements`.
    """
    connection = connection_of(unit)
    if connection.dialect.name != "postgresql":
        for model, values in rows:
            insert_row(connection, model, **values)
        return rows[0][1][returning]
    parts, parameters = [], dict[str, Any]()
    for number, (model, values) in enumerate(rows):
        table = _table(model)
        expressions, plain = _apart(table, values)
        parts.append((table, expressions, tuple(plain)))
        parameters.update({f"of_{number}_{name}": value for name, value in plain.items()})
    return connection.execute(_together(tuple(parts), returning), parameters).scalar_one()


def insert_if_absent(unit: Unit, model: type[Base], key: str, /, **values: Any) -> None:
    """Insert a row, unless one with its value of the unique column `key` exists."""
    table = _table(model)
    expressions, plain = _apart(table, values)
    _run(unit, _insert_if_absent(connection_of(unit).dialect.name, table, key, expressions), plain)


def _run(
    unit: Unit, statement: Executable, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> CursorResult[Any]:
    # Not `Session.execute`, which would do an ORM's work for a statement that needs none.
    return connection_of(unit).execute(statement, values)


def _table(model: type[Base]) -> Table:
    return cast(Table, model.__table__)


def _refuse_unknown(table: Table, names: Iterable[str]) -> None:
    """Raise `TypeError` for names of no column. SQLAlchemy would ignore them silently."""
    if unknown := [name for name in names if name not in table.c]:
        raise TypeError(f"{table.name} has no column {', '.join(unknown)}")


def _apart(table: Table, values: Mapping[str, Any]) -> tuple[Expressions, dict[str, Any]]:
    """Divide values into SQL expressions, which are part of the statement, and parameters."""
    _refuse_unknown(table, values)
    expressions = tuple((name, value) for name, value in values.items() if isinstance(value, ClauseElement))
    return expressions, {name: value for name, value in values.items() if not isinstance(value, ClauseElement)}


@lru_cache(KEPT)
def _update(table: Table, where: tuple[ColumnElement[bool], ...], expressions: Expressions) -> Update:
    return update(table).where(*where).values(dict(expressions))


@lru_cache(KEPT)
def _insert(table: Table, expressions: Expressions) -> Insert:
    return insert(table).values(dict(expressions))


@lru_cache(KEPT)
def _together(parts: tuple[tuple[Table, Expressions, tuple[str, ...]], ...], returning: str) -> Select[Any]:
    statements = []
    for number, (table, expressions, plain) in enumerate(parts):
        given = {name: bindparam(f"of_{number}_{name}", type_=table.c[name].type) for name in plain}
        statements.append(insert(table).values({**dict(expressions), **given}))
    first = statements[0].returning(parts[0][0].c[returning]).cte("part_0")
    others = [statement.cte(f"part_{number}") for number, statement in enumerate(statements[1:], 1)]
    return select(first).add_cte(*others)


@lru_cache(KEPT)
def _insert_if_absent(dialect: str, table: Table, key: str, expressions: Expressions) -> Insert:
    return ignoring(insert_of(dialect, table).values(dict(expressions)), key)


def insert_of(dialect: str, table: Table) -> Any:
    """Return the INSERT of a dialect, which can ignore a conflict."""
    if dialect in MYSQL:
        return mysql.insert(table)
    # Imported here: a process that uses another database starts faster without it.
    if dialect == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    from sqlalchemy.dialects import sqlite

    return sqlite.insert(table)


def ignoring(statement: Any, key: str) -> Insert:
    """Have an `insert_of` add nothing if a row with its value of the unique column `key` exists."""
    if isinstance(statement, mysql.Insert):
        # Set to itself, and not INSERT IGNORE, which would also let a text through that is too long.
        return statement.on_duplicate_key_update({key: statement.table.c[key]})
    ignored: Insert = statement.on_conflict_do_nothing(index_elements=[key])
    return ignored
