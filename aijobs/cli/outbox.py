"""`aijobs outbox …`: events that could not be delivered."""

from __future__ import annotations

import click

from aijobs.cli.acting import shell_actor
from aijobs.cli.opening import json_option, open_services, write_json
from aijobs.operators.actions import Operating


@click.group()
def outbox() -> None:
    """The outbox."""


@outbox.command()
@click.argument("event_id", metavar="ID")
@json_option
def requeue(event_id: str, as_json: bool) -> None:
    """Send a dead end event again. (The job of a dead enqueue event has failed: retry the job instead.)"""
    with open_services() as services:
        event = Operating(services, shell_actor()).requeue(event_id)
    if as_json:
        write_json({"eventId": event.id, "eventType": event.event_type, "status": event.status})
    else:
        click.echo(f"{event.event_type} {event.id} is {event.status} again")
