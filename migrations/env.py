"""What Alembic runs, for `aijobs db upgrade` and for Flask-Migrate's `flask db …` alike.

The connection is the one that `aijobs.db.schema.upgrade` hands over, else the Flask application's, else one to the
database of the settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alembic import context
from flask import current_app, has_app_context
from sqlalchemy import Connection, Engine

from aijobs.db.database import Base, Json, Key, LongText, UtcDateTime
from aijobs.db.engines import WRITING, build_engine
from aijobs.db.schema import one_upgrade_at_a_time
from aijobs.settings import Settings


def render_item(kind: str, item: Any, autogen_context: Any) -> str | bool:
    """Our column types by the names they have in `aijobs.db.database`; False leaves an item to Alembic."""
    if kind != "type":
        return False
    named = {id(Json): "Json", id(LongText): "LongText"}.get(id(item))
    if isinstance(item, UtcDateTime):
        named = "UtcDateTime()"
    elif isinstance(item, Key):
        named = f"Key({item.impl_instance.length})"
    if named is None:
        return False
    autogen_context.imports.add(f"from aijobs.db.database import {named.partition('(')[0]}")
    return named


@contextmanager
def _connect() -> Iterator[Connection]:
    given = context.config.attributes.get("connection")
    if given is not None:
        yield given
        return
    engine = _engine()
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _engine() -> Engine:
    """One of our own, as the application's is not patient enough for changes of the schema."""
    if has_app_context() and "migrate" in current_app.extensions:
        return build_engine(current_app.extensions["migrate"].db.engine.url, patient=True)
    return build_engine(Settings.load().database_url, patient=True)


def _run_online() -> None:
    with _connect() as given:
        connection = given.execution_options(**WRITING)
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            render_item=render_item,
            compare_type=True,
            # SQLite can't alter a column in place, and it can undo DDL once BEGIN is ours (it is, see aijobs.db.engines).
            render_as_batch=connection.dialect.name == "sqlite",
            transactional_ddl=connection.dialect.name in ("sqlite", "postgresql"),
        )
        with context.begin_transaction(), one_upgrade_at_a_time(connection):
            context.run_migrations()


def _run_offline() -> None:
    """`flask db upgrade --sql`: the statements, for who must read them before they run."""
    url = _engine().url.render_as_string(hide_password=False)
    context.configure(
        url=url, target_metadata=Base.metadata, render_item=render_item, literal_binds=True, compare_type=True
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    _run_offline()
else:
    _run_online()
