"""Count with a limit, so that a statement reads a limited number of rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, func, literal, select

from aijobs.monitor import views


def capped_count(table: type[Any], *conditions: ColumnElement[bool], cap: int | None = None) -> ScalarSelect[int]:
    """Build a column with the number of rows of `table` that match the conditions, at most `cap` (`views.CAP`)."""
    enough = views.CAP if cap is None else cap
    some = select(literal(1).label("one")).select_from(table).where(*conditions).limit(enough).subquery()
    return select(func.count()).select_from(some).scalar_subquery()
