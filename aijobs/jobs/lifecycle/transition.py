"""A change of a job and the rows that go with it: one statement on PostgreSQL, one after another elsewhere.

Each rule is written once, in terms of the columns of the changed row. On PostgreSQL they are the result of the UPDATE,
in a data-modifying WITH. Elsewhere they are the table's, and the UPDATE has been made before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, cast

from sqlalchemy import ColumnElement, FromClause, Select, Table, Update, bindparam, literal, select
from sqlalchemy.sql.dml import UpdateBase

from aijobs.db.database import Base, Unit, connection_of
from aijobs.db.statements import ignoring, insert_of
from aijobs.jobs.lease import HeldJob
from aijobs.jobs.models import AiJob

JOBS = cast(Table, AiJob.__table__)
OF_JOB = bindparam("of_job", type_=JOBS.c.id.type)
"""The parameter that names the job, in each part of a transition."""
_RETURNED = [JOBS.c[column.name] for column in fields(HeldJob)] + [JOBS.c.event_seq, JOBS.c.locked_at]
"""The columns of the changed row on PostgreSQL."""


Inserts = tuple[tuple[type[Base], str | None, Callable[[Any], Mapping[str, Any]]], ...]
"""Rows to add: their model, a unique column whose conflicts are ignored, and their values from the columns of the
changed row.
"""


@dataclass(frozen=True, eq=False)
class Transition:
    """Built once a process; only the parameters change. No parameter has the name of a column."""

    change: Update
    """The compare-and-set. It finds one row at most."""
    inserts: Inserts
    read: Callable[[FromClause], Select[Any]] | None = None
    """The query for what is returned, from the changed row; without it, its id."""
    update: Callable[[Any], Update] | None = None
    """The change of another row, from the columns of the changed one."""

    def run(self, unit: Unit, parameters: Mapping[str, Any]) -> Sequence[Any] | None:
        """Make the change and return what is read then; None if the compare-and-set found no row."""
        connection = connection_of(unit)
        if connection.dialect.name == "postgresql":
            return connection.execute(self._joined, parameters).one_or_none()
        if not connection.execute(self.change, parameters).rowcount:
            return None
        for statement in self._after_change(connection.dialect.name):
            connection.execute(statement, parameters)
        return connection.execute(self._read_table, parameters).one() if self.read is not None else ()

    @cached_property
    def _joined(self) -> Select[Any]:
        changed = self.change.returning(*_RETURNED).cte("changed")
        parts = [part.cte(f"part_{number}") for number, part in enumerate(self._parts("postgresql", changed))]
        return self._read(changed).add_cte(*parts)

    @cache  # noqa: B019 - there is one of each a process.
    def _after_change(self, dialect: str) -> list[UpdateBase]:
        return self._parts(dialect, JOBS)

    @cached_property
    def _read_table(self) -> Select[Any]:
        return self._read(JOBS)

    def _read(self, source: FromClause) -> Select[Any]:
        read = self.read(source) if self.read is not None else select(source.c.id)
        return read.where(source.c.id == OF_JOB)

    def _parts(self, dialect: str, source: FromClause) -> list[UpdateBase]:
        parts: list[UpdateBase] = [
            _insert(dialect, model, key, build(source.c), source) for model, key, build in self.inserts
        ]
        if self.update is not None:
            parts.append(self.update(source.c).where(source.c.id == OF_JOB))
        return parts


def _insert(dialect: str, model: type[Base], key: str | None, row: Mapping[str, Any], source: FromClause) -> UpdateBase:
    table = cast(Table, model.__table__)
    columns = table.c
    values: list[ColumnElement[Any]] = [
        value if isinstance(value, ColumnElement) else literal(value, columns[name].type) for name, value in row.items()
    ]
    statement = insert_of(dialect, table).from_select(list(row), select(*values).where(source.c.id == OF_JOB))
    return statement if key is None else ignoring(statement, key)
