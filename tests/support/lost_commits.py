"""COMMITs whose answer is lost, before or after they take effect."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from aijobs.db.database import Database


@contextmanager
def lose_commits(database: Database, when: Literal["before", "after"], *, times: int = 1) -> Iterator[list[int]]:
    """Cut the connection at the next `times` COMMITs, `before` or `after` they take effect.

    Yields a list with one number: how many are still to be lost.
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


@contextmanager
def late_commit(database: Database, seconds: float = 0.5) -> Iterator[list[int]]:
    """Lose the next COMMIT's answer and delay the COMMIT by `seconds`, as a slow network would.

    Yields a list with one number: 1, and 0 after the answer was lost.
    """
    dialect: Any = database.engine.dialect
    original, left, waiting = dialect.do_commit, [1], list[threading.Timer]()
    kept: list[Any] = []
    answer, is_disconnect = _disconnect(dialect), dialect.is_disconnect

    def commit(connection: Any) -> None:
        if left[0] == 0:
            original(connection)
            return
        left[0] = 0
        driver = connection.dbapi_connection
        kept.append(driver)

        def arrive() -> None:
            driver.commit()
            driver.close()

        waiting.append(threading.Timer(seconds, arrive))
        waiting[0].start()
        raise answer

    def close(connection: Any) -> None:
        if connection not in kept:
            connection.close()

    dialect.do_commit, dialect.do_close, dialect.do_terminate = commit, close, close
    dialect.do_rollback = lambda connection: None if connection.dbapi_connection in kept else connection.rollback()
    dialect.is_disconnect = lambda error, *rest: error is answer or is_disconnect(error, *rest)
    try:
        yield left
    finally:
        for timer in waiting:
            timer.join()
        del dialect.do_commit, dialect.do_close, dialect.do_terminate, dialect.do_rollback, dialect.is_disconnect


def _disconnect(dialect: Any) -> Exception:
    """Return the driver's error for a lost connection."""
    if dialect.name == "sqlite":
        return dialect.dbapi.ProgrammingError("Cannot operate on a closed database.")
    if dialect.name == "postgresql":
        return dialect.dbapi.OperationalError("server closed the connection unexpectedly")
    return dialect.dbapi.OperationalError(2013, "Lost connection to server during query")
