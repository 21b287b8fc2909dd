"""Open what commands need: settings, a database of the right version, all services."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from aijobs import logs
from aijobs.ai.catalogue import Catalogue
from aijobs.canonical import json_name
from aijobs.clock import iso
from aijobs.db.database import Database
from aijobs.db.schema import check_schema
from aijobs.errors import SettingsError
from aijobs.queues.broker import RedisBroker
from aijobs.settings import Settings

if TYPE_CHECKING:
    from aijobs.wiring.services import Services


def load_settings() -> Settings:
    """Return the settings. A command logs errors only, to standard error."""
    settings = Settings.load()
    logs.configure("ERROR")
    return settings


def load_catalogue(settings: Settings) -> Catalogue:
    """Return the providers of the settings."""
    return Catalogue.load(settings.providers, settings.provider_keys)


@contextmanager
def open_database(settings: Settings) -> Iterator[Database]:
    """Open the database and check its schema. It is closed at the end."""
    database = Database(settings.database_url)
    try:
        check_schema(database.engine)
        yield database
    finally:
        database.dispose()


@contextmanager
def open_services() -> Iterator[Services]:
    """Open all services, with a checked database. The broker may be away: workers find what it missed."""
    from aijobs.wiring.services import build_services

    settings = load_settings()
    broker = _find_broker(settings)
    with open_database(settings) as database:
        try:
            yield build_services(settings, database=database, broker=broker)
        finally:
            broker.client.close()


def _find_broker(settings: Settings) -> RedisBroker:
    """Return the broker. If the embedded one doesn't run, one that refuses everything: reading a job needs none."""
    try:
        return RedisBroker.from_settings(settings)
    except SettingsError:
        if settings.redis_url:
            raise
        return RedisBroker.at(f"unix://{settings.instance_path / 'no-broker'}", settings.message_keys)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--json`, as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Write JSON instead of text.")(command)


def to_json(value: Any) -> Any:
    """Return a dataclass as JSON: names in camelCase, times as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {json_name(f.name): to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def write_json(value: Any) -> None:
    """Print `value` as indented JSON."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))
