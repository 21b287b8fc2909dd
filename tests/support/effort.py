"""A count of the rows that a database reads: a measure of work that doesn't depend on the load of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from sqlalchemy import Engine, event, text

STEPS = 10
"""Instructions of SQLite's virtual machine per count."""
ROWS_READ = {
    "postgresql": "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables",
    "mysql": "SELECT sum(variable_value) FROM information_schema.global_status"
    " WHERE variable_name LIKE 'Handler\\_read\\_%'",
}
"""Rows that all connections have read: in this database on PostgreSQL, on the whole server on MariaDB."""


def effort(engine: Engine, work: Callable[[], object]) -> int:
    """Run `work` and return how many rows the database read for it; on SQLite, tens of instructions.

    Compare the number only with that of the same work on other data. On the servers no other connection may read
    at the same time.
    """
    kind = engine.dialect.name
    if kind == "sqlite":
        return _count_steps(engine, work)
    before = _rows_read(engine)
    with _listening(engine, "after_cursor_execute", _flush_statistics) if kind == "postgresql" else nullcontext():
        work()
    return _rows_read(engine) - before


def _count_steps(engine: Engine, work: Callable[[], object]) -> int:
    steps = 0
    counted: list[Any] = []

    def step() -> None:
        nonlocal steps
        steps += 1

    def count(_conn: Any, cursor: Any, *_rest: Any) -> None:
        counted.append(cursor.connection)
        cursor.connection.set_progress_handler(step, STEPS)

    try:
        with _listening(engine, "before_cursor_execute", count):
            work()
    finally:
        for connection in counted:  # Only now, because SQLite reads rows while they are fetched.
            connection.set_progress_handler(None, 0)
    return steps


def _flush_statistics(_conn: Any, cursor: Any, *_rest: Any) -> None:
    """Make PostgreSQL publish its counts at the end of this transaction, not only once a second."""
    cursor.connection.execute("SELECT pg_stat_force_next_flush()")


def _rows_read(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(ROWS_READ[engine.dialect.name])).scalar_one())


@contextmanager
def _listening(engine: Engine, name: str, listener: Callable[..., None]) -> Iterator[None]:
    event.listen(engine, name, listener)
    try:
        yield
    finally:
        event.remove(engine, name, listener)
