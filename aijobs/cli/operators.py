"""`aijobs create-operator`, `operator-token` and `operator …`: the users of console and admin API."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

import click
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from aijobs.cli.acting import shell_actor
from aijobs.cli.failures import BAD_INPUT, Failure
from aijobs.cli.opening import json_option, load_settings, open_database, to_json, write_json
from aijobs.clock import iso, utc_now
from aijobs.db.clock import DatabaseClock
from aijobs.operators import accounts as operators
from aijobs.operators.audit import AuditTrail
from aijobs.operators.models import OPERATOR, ROLES, Operator, OperatorToken
from aijobs.operators.sessions import SessionRow, SessionRules, list_sessions
from aijobs.texts import line_fault
from aijobs.web.auth import hash_password, make_operator_token

T = TypeVar("T")

SHORTEST_PASSWORD = 10
LONGEST_PASSWORD = 200
LONGEST_LABEL = 100

_password_option = click.option(
    "--password-stdin", is_flag=True, help="Read the password from the first line of standard input."
)


def _write(work: Callable[[Session, AuditTrail], T]) -> T:
    """Run `work` in one transaction, with an audit trail."""
    with open_database(load_settings()) as database:
        trail = AuditTrail(database, DatabaseClock(), shell_actor())
        return database.write(lambda session: work(session, trail))


# --- making ------------------------------------------------------------------------------------------------------


@click.command("create-operator")
@click.argument("username")
@click.option("--role", type=click.Choice(ROLES), default=OPERATOR, show_default=True)
@_password_option
def create_operator(username: str, role: str, password_stdin: bool) -> None:
    """Create an operator who can sign in to the console.

    VIEWER reads; OPERATOR also retries and cancels; SUPER_ADMIN also sees internal errors and reveals content.
    """
    if fault := operators.username_fault(username):
        raise Failure(f"the username {fault}", BAD_INPUT)
    hashed = hash_password(_read_password(password_stdin))
    try:
        _write(lambda session, trail: operators.create_operator(session, trail, username, hashed, role))
    except IntegrityError:
        raise Failure(f"there is an operator {username!r} already") from None
    click.echo(f"Made operator {username} ({role}).")


def _read_password(from_stdin: bool) -> str:
    if from_stdin:
        password = sys.stdin.readline().rstrip("\r\n")
    elif sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        raise Failure("no terminal to ask for the password on: use --password-stdin", BAD_INPUT)
    if not SHORTEST_PASSWORD <= len(password) <= LONGEST_PASSWORD:
        raise Failure(f"a password has {SHORTEST_PASSWORD}–{LONGEST_PASSWORD} characters", BAD_INPUT)
    return str(password)


@click.command("operator-token")
@click.argument("username")
@click.option("--label", default="command line", show_default=True, help="What it is for, as lists show it.")
@click.option("--days", type=click.IntRange(1, 3650), default=90, show_default=True, help="How long it lasts.")
def operator_token(username: str, label: str, days: int) -> None:
    """Print a new token of an operator for the admin API. It is shown only now, because only its digest is stored."""
    if fault := line_fault(label, LONGEST_LABEL):
        raise Failure(f"the label {fault}", BAD_INPUT)
    token, digest = make_operator_token()
    until = utc_now() + timedelta(days=days)
    _write(lambda session, trail: operators.add_token(session, trail, username, digest, label, until))
    click.echo(token)


# --- seeing and unmaking -----------------------------------------------------------------------------------------


@click.group()
def operator() -> None:
    """Existing operators."""


@operator.command()
@click.argument("username")
def disable(username: str) -> None:
    """Disable an operator: sessions end and tokens stop working at once."""
    changed = _write(lambda session, trail: operators.set_active(session, trail, username, False))
    click.echo(f"{username} is disabled" + ("." if changed else " already."))


@operator.command()
@click.argument("username")
def enable(username: str) -> None:
    """Enable a disabled operator. Tokens that weren't revoked work again."""
    changed = _write(lambda session, trail: operators.set_active(session, trail, username, True))
    click.echo(f"{username} is enabled" + ("." if changed else " already."))


@operator.command()
@click.argument("username")
@_password_option
def password(username: str, password_stdin: bool) -> None:
    """Set a new password of an operator, which ends all sessions."""
    hashed = hash_password(_read_password(password_stdin))
    _write(lambda session, trail: operators.set_password(session, trail, username, hashed))
    click.echo(f"{username} has a new password; older sessions have ended.")


@operator.command("revoke-token")
@click.argument("username")
@click.option("--id", "token_id", metavar="ID", help="One token, by its id in `aijobs operator list`.")
@click.option("--all", "every", is_flag=True, help="All of the operator's tokens.")
def revoke_token(username: str, token_id: str | None, every: bool) -> None:
    """Revoke a token of an operator, or all of them, for good."""
    if (token_id is None) == (not every):
        raise Failure("say which token: --id ID, or --all", BAD_INPUT)
    count = _write(lambda session, trail: operators.revoke_tokens(session, trail, username, token_id))
    click.echo(f"{count} token{'' if count == 1 else 's'} of {username} revoked.")


@operator.command("revoke-session")
@click.argument("username")
@click.option("--id", "session_id", metavar="ID", help="One session, by its id in `aijobs operator list`.")
@click.option("--all", "every", is_flag=True, help="All of the operator's sessions.")
def revoke_session(username: str, session_id: str | None, every: bool) -> None:
    """Sign an operator out of one browser, or of all. Tokens stay."""
    if (session_id is None) == (not every):
        raise Failure("say which session: --id ID, or --all", BAD_INPUT)
    clock = DatabaseClock()
    count = _write(
        lambda session, trail: operators.revoke_operator_sessions(session, trail, clock, username, session_id)
    )
    click.echo(f"{count} session{'' if count == 1 else 's'} of {username} revoked.")


@dataclass(frozen=True)
class TokenLine:
    """A token in the list, without its text."""

    id: str
    label: str
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True)
class OperatorLine:
    """An operator in the list."""

    username: str
    role: str
    active: bool
    created_at: datetime
    last_login_at: datetime | None
    tokens: list[TokenLine]
    sessions: list[SessionRow]


@operator.command("list")
@json_option
def list_operators(as_json: bool) -> None:
    """List the operators, their tokens and their sessions."""
    settings = load_settings()
    with open_database(settings) as database, database.read() as session:
        lines = _lines(session, SessionRules(settings, DatabaseClock()))
    if as_json:
        write_json(to_json(lines))
        return
    if not lines:
        click.echo("There are no operators yet: `aijobs create-operator USERNAME` makes one.")
    for line in lines:
        state = "active" if line.active else "disabled"
        click.echo(f"{line.username}  {line.role}  {state}  {_told('last sign-in', line.last_login_at)}")
        for token in line.tokens:
            ends = _told("revoked", token.revoked_at) if token.revoked_at else _told("expires", token.expires_at)
            click.echo(f"  {token.id}  {token.label}  {ends}  {_told('last used', token.last_used_at)}")
        for row in line.sessions:
            began, used = _told("signed in", row.created_at), _told("last used", row.seen_at)
            ended = f"ended ({row.ended})  " if row.ended else ""
            where = f"session from {row.remote_addr or 'nowhere'}"
            click.echo(f"  {row.id}  {where}  {ended}{began}  {used}  {row.user_agent or ''}")


def _lines(session: Session, rules: SessionRules) -> list[OperatorLine]:
    tokens: dict[str, list[TokenLine]] = {}
    for row in session.scalars(select(OperatorToken).order_by(OperatorToken.created_at, OperatorToken.id)):
        values = {name: getattr(row, name) for name in TokenLine.__dataclass_fields__}
        tokens.setdefault(row.operator_id, []).append(TokenLine(**values))
    sessions: dict[str, list[SessionRow]] = {}
    for found in list_sessions(session, rules):
        sessions.setdefault(found.username, []).append(found)
    return [
        OperatorLine(
            o.username,
            o.role,
            o.active,
            o.created_at,
            o.last_login_at,
            tokens.get(o.id, []),
            sessions.get(o.username, []),
        )
        for o in session.scalars(select(Operator).order_by(Operator.username))
    ]


def _told(what: str, at: datetime | None) -> str:
    return f"{what} {iso(at) if at else 'never'}"
