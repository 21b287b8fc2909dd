"""`aijobs db …`: the schema."""

from __future__ import annotations

import click

from aijobs.cli.opening import json_option, load_settings, write_json
from aijobs.db.engines import build_engine
from aijobs.db.schema import HEAD, upgrade


@click.group()
def db() -> None:
    """The database's schema."""


@db.command("upgrade")
@json_option
def upgrade_command(as_json: bool) -> None:
    """Create the schema, or upgrade it to this version. Safe to run again, and on several machines at once."""
    engine = build_engine(load_settings().database_url)
    try:
        before = upgrade(engine)
    finally:
        engine.dispose()
    if as_json:
        write_json({"before": before, "now": HEAD})
    elif before == HEAD:
        click.echo(f"The schema is at {HEAD} already.")
    else:
        click.echo(f"The schema is at {HEAD} now (before: {before or 'none'}).")
