"""How much a database has to read for its answers, as a number that no busy machine changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from sqlalchemy import Engine, event, text

STEPS = 10
"""Of SQLite's virtual machine, between one count and the next."""
READ_SO_FAR = {
    "postgresql": "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables",
    "mysql": "SELECT sum(variable_value) FROM information_schema.global_status"
    " WHERE variable_name LIKE 'Handler\\_read\\_%'",
}
"""The rows that everybody has read: in this database on PostgreSQL, on this server on MariaDB."""


def effort(engine: Engine, work: Callable[[], object]) -> int:
    """What the statements that `work` runs on `engine` make the database read: rows, on SQLite tens of steps.

    To be compared with that of the same work on other data. On the servers nobody else may be at work meanwhile.
    """
    kind = engine.dialect.name
    if kind == "sqlite":
        return _count_steps(engine, work)
    before = _read_so_far(engine)
    with _listening(engine, "after_cursor_execute", _tell_at_once) if kind == "postgresql" else nullcontext():
        work()
    return _read_so_far(engine) - before


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
        for connection in counted:  # Not sooner: rows are read while they are fetched.
            connection.set_progress_handler(None, 0)
    return steps


def _tell_at_once(_conn: Any, cursor: Any, *_rest: Any) -> None:
    """PostgreSQL's processes tell what they read once a second; this one does so at its transaction's end."""
    cursor.connection.execute("SELECT pg_stat_force_next_flush()")


def _read_so_far(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(READ_SO_FAR[engine.dialect.name])).scalar_one())


@contextmanager
def _listening(engine: Engine, name: str, listener: Callable[..., None]) -> Iterator[None]:
    event.listen(engine, name, listener)
    try:
        yield
    finally:
        event.remove(engine, name, listener)
