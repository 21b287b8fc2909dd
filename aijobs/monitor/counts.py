"""Counting without counting everything: at most so many rows are looked at."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, func, literal, select

from aijobs.monitor import views


def capped_count(table: type[Any], *conditions: ColumnElement[bool], cap: int | None = None) -> ScalarSelect[int]:
    """How many rows of `table` fulfil the conditions, at most `cap` (`views.CAP`), as a column of a statement."""
    enough = views.CAP if cap is None else cap
    some = select(literal(1).label("one")).select_from(table).where(*conditions).limit(enough).subquery()
    return select(func.count()).select_from(some).scalar_subquery()
