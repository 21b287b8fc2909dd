"""COMMITs whose answer is lost, before or after they took effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from aijobs.db import Database


@contextmanager
def lose_commits(database: Database, when: Literal["before", "after"], *, times: int = 1) -> Iterator[list[int]]:
    """Cut the connection at the next `times` COMMITs, `before` the server sees them or `after` it obeyed.

    What is given counts down to 0 once all were lost.
    """
    dialect: Any = database.engine.dialect
    original, left = dialect.do_commit, [times]

    def commit(connection: Any) -> None:
        if left[0] == 0:
            original(connection)
            return
        left[0] -= 1
        if when == "after":
            original(connection)
        connection.dbapi_connection.close()
        raise _disconnect(dialect)

    dialect.do_commit = commit
    try:
        yield left
    finally:
        del dialect.do_commit


def _disconnect(dialect: Any) -> Exception:
    """The driver's error for a connection that is gone."""
    if dialect.name == "sqlite":
        return dialect.dbapi.ProgrammingError("Cannot operate on a closed database.")
    if dialect.name == "postgresql":
        return dialect.dbapi.OperationalError("server closed the connection unexpectedly")
    return dialect.dbapi.OperationalError(2013, "Lost connection to server during query")
