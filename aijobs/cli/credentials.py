"""`aijobs credentials …`: users' stored provider keys. No command shows them."""

from __future__ import annotations

import click

from aijobs.cli.acting import shell_actor
from aijobs.cli.opening import json_option, open_services, to_json, write_json
from aijobs.credentials.rotation import Rotated
from aijobs.operators.audit import CREDENTIAL, AuditTrail
from aijobs.wiring.passes import build_rotation


@click.group()
def credentials() -> None:
    """Users' own provider keys, as they are stored."""


@credentials.command()
@json_option
def rotate(as_json: bool) -> int:
    """Re-encrypt all stored keys with the newest of AIJOBS_CREDENTIAL_KEYS. Exit code 1 if one still needs another.

    Safe at any time, under traffic, and again after it was stopped: finished rows are left alone.
    """
    with open_services() as services:
        trail = AuditTrail(services.database, services.clock, shell_actor())
        newest = services.credential_store.vault.current_key_id
        with trail.entry("credential.rotate", CREDENTIAL, newest, reason=None, before={}) as entry:
            done = build_rotation(services).run()
            entry.after = {
                "rotated": done.rotated,
                "unreadable": len(done.unreadable),
                "remaining": done.remaining,
            }
    if as_json:
        write_json({**to_json(done), "isComplete": done.is_complete})
    else:
        _print(done)
    return 0 if done.is_complete else 1


def _print(done: Rotated) -> None:
    click.echo(f"{_keys(done.rotated)} encrypted anew under {done.key_id}")
    for credential_id in done.unreadable:
        click.echo(f"can't be decrypted: {credential_id}")
    if done.is_complete:
        click.echo(f"Every stored key is under {done.key_id}: the older ones of the ring may go.")
    else:
        click.echo(f"{_keys(done.remaining)} under other keys: keep the ring as it is.")


def _keys(count: int) -> str:
    return "1 stored key" if count == 1 else f"{count} stored keys"
