"""`aijobs up`: run everything on this machine, until Ctrl-C."""

from __future__ import annotations

import json
import secrets
import shlex
from pathlib import Path

import click
from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs import logs
from aijobs.cli.acting import shell_actor
from aijobs.cli.terminal import Terminal
from aijobs.cli.tokens import issue_user_token
from aijobs.db.clock import DatabaseClock
from aijobs.db.database import Database
from aijobs.local.station import LOG_FOLDER, Station, StopRequests
from aijobs.machine import write_private
from aijobs.operators.accounts import create_operator
from aijobs.operators.audit import AuditTrail
from aijobs.operators.models import SUPER_ADMIN, Operator
from aijobs.settings import Settings
from aijobs.web.auth import hash_password, verify_password

FIRST_OPERATOR_FILE = "first-operator.json"
FIRST_OPERATOR = "admin"
DEMO_USER = "demo"
TOKEN_HOURS = 24

_NOTES = {
    "lang": "en",
    "source": {"id": "osmosis", "title": "Osmosis"},
    "segments": [
        {
            "sid": "p1",
            "text": "Osmosis is the movement of water across a partially permeable membrane."
            " A solute is a substance that is dissolved in a liquid.",
        }
    ],
}


@click.command()
def up() -> None:
    """Run everything on this machine until Ctrl-C: broker, web, workers, console.

    Without settings it needs nothing else: it uses SQLite and an embedded broker, with their files in one folder, which
    it prints. With AIJOBS_DATABASE_URL and AIJOBS_REDIS_URL it uses those. The port is AIJOBS_PORT, or the next free
    one above 8000.
    """
    settings = Settings.load()
    logs.configure("ERROR")
    terminal = Terminal()
    terminal.progress("Starting…")
    with StopRequests().listening() as stop, Station(settings, stop, terminal.say) as station:
        _welcome(terminal, settings, station.place.url)
        station.supervise()
        terminal.progress("Stopping: what runs may end (Ctrl-C again: at once)…")
    terminal.say("Stopped.")


def _welcome(terminal: Terminal, settings: Settings, url: str) -> None:
    database = Database(settings.database_url)
    try:
        login = ensure_first_operator(database, settings)
    finally:
        database.dispose()
    token = issue_user_token(settings, DEMO_USER, TOKEN_HOURS)
    bold = terminal.style
    terminal.say(
        f"aijobs is up. Its files are in {shown_path(settings.instance_path)}/, its logs in {LOG_FOLDER}/ there."
    )
    terminal.say()
    terminal.say(f"  Console     {bold(url + '/console/', bold=True)}")
    terminal.say(f"  Sign in     {login}")
    terminal.say(f"  User token  {token}")
    terminal.say(f"              (user {DEMO_USER}, {TOKEN_HOURS} hours)")
    terminal.say()
    terminal.say("  Try it; paste this whole line:")
    terminal.say()
    terminal.say(curl_line(url, token))
    terminal.say()
    terminal.say("Ctrl-C stops everything.")


def ensure_first_operator(database: Database, settings: Settings) -> str:
    """Return how to sign in, in one line. Without operators, the first one is created with a random password.

    The password is kept in `instance/`, readable by its owner alone, so that it can be shown again.
    """
    path = settings.instance_path / FIRST_OPERATOR_FILE
    made: list[str] = []
    trail = AuditTrail(database, DatabaseClock(), shell_actor())

    def ensure(session: Session) -> str | None:
        made.clear()
        if session.scalar(select(Operator.id).limit(1)) is None:
            made.append(secrets.token_urlsafe(12))
            create_operator(session, trail, FIRST_OPERATOR, hash_password(made[0]), SUPER_ADMIN)
            write_private(path, json.dumps({"username": FIRST_OPERATOR, "password": made[0]}))
        return session.scalar(
            select(Operator.password_hash).where(Operator.username == FIRST_OPERATOR, Operator.active)
        )

    password_hash = database.write(ensure)
    password = made[0] if made else _kept_password(path)
    if password and verify_password(password_hash, password):
        return f"{FIRST_OPERATOR} / {password}"
    if password_hash:
        return f"{FIRST_OPERATOR}, with the password that you gave"
    return "as one of the operators (aijobs create-operator makes more)"


def _kept_password(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["password"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def curl_line(url: str, token: str) -> str:
    """Return one line for a shell that asks for flashcards, waits until the job is final, and shows it with
    its cards.
    """
    body = shlex.quote(json.dumps(_NOTES, ensure_ascii=False))
    return (
        f"""A={shlex.quote(f"Authorization: Bearer {token}")}; U={url}; """
        f"""J=$(curl -sS -H "$A" -H 'Content-Type: application/json' -d {body} $U/api/learning/flashcards"""
        """ | sed -n 's/.*"jobId": *"\\([^"]*\\)".*/\\1/p'); """
        """for i in 1 2 3 4 5 6 7 8 9; do curl -sS -H "$A" $U/api/ai/jobs/$J | grep finishedAt && break; """
        """sleep 1; done; """
        """curl -sS -H "$A" "$U/api/learning/flashcards?jobId=$J\""""
    )


def shown_path(path: Path) -> str:
    """Return `path` relative to the current folder, if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
