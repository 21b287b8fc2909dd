"""`aijobs create-operator` and `aijobs operator-token`: who may use the console and the admin API."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta

import click
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from aijobs.clock import utc_now
from aijobs.web.auth import hash_password, make_operator_token
from aijobs.web.cli.failures import BAD_INPUT, Failure
from aijobs.web.cli.opening import load_settings, open_database
from aijobs.web.models import OPERATOR, ROLES, Operator, OperatorToken

SHORTEST_PASSWORD = 10
LONGEST_PASSWORD = 200


def add_operator(session: Session, username: str, password: str, role: str) -> Operator:
    """Insert an operator. `IntegrityError` where the name is taken."""
    operator = Operator(username=username, password_hash=hash_password(password), role=role, created_at=utc_now())
    session.add(operator)
    session.flush()
    return operator


def add_operator_token(session: Session, operator: Operator, label: str, expires_at: datetime | None) -> str:
    """Insert a token of `operator`; the token itself, which is stored as a digest alone."""
    token, digest = make_operator_token()
    session.add(
        OperatorToken(
            operator_id=operator.id,
            token_hash=digest,
            label=label,
            created_at=utc_now(),
            expires_at=expires_at,
        )
    )
    return token


@click.command("create-operator")
@click.argument("username")
@click.option("--role", type=click.Choice(ROLES), default=OPERATOR, show_default=True)
@click.option("--password-stdin", is_flag=True, help="Read the password from the first line of standard input.")
def create_operator(username: str, role: str, password_stdin: bool) -> None:
    """Make an operator who can sign in to the console.

    VIEWER reads; OPERATOR also retries and cancels; SUPER_ADMIN also sees internal errors and reveals content.
    """
    if not 1 <= len(username) <= 100 or username != username.strip() or not username.isprintable():
        raise Failure("a username has 1–100 characters, no control characters and no space at either end", BAD_INPUT)
    password = _read_password(password_stdin)
    with open_database(load_settings()) as database:
        try:
            database.write(lambda session: add_operator(session, username, password, role))
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
@click.option("--label", default="command line", show_default=True, help="What it is for, as the console lists it.")
@click.option("--days", type=click.IntRange(1, 3650), default=90, show_default=True, help="How long it lasts.")
def operator_token(username: str, label: str, days: int) -> None:
    """Print a new token of an operator for the admin API. It is shown this once: only its digest is kept."""
    if not 1 <= len(label) <= 100:
        raise Failure("a label has 1–100 characters", BAD_INPUT)

    def issue(session: Session) -> str:
        operator = session.scalar(select(Operator).where(Operator.username == username))
        if operator is None or not operator.active:
            raise Failure(f"there is no active operator {username!r}")
        return add_operator_token(session, operator, label, utc_now() + timedelta(days=days))

    with open_database(load_settings()) as database:
        click.echo(database.write(issue))
