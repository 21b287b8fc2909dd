"""`aijobs token`: a user's token, like those that the learning app issues."""

from __future__ import annotations

from datetime import timedelta

import click
import jwt

from aijobs.canonical import identifier_fault
from aijobs.cli.failures import BAD_INPUT, Failure
from aijobs.cli.opening import load_settings
from aijobs.clock import utc_now
from aijobs.settings import Settings

_LONGEST_HOURS = 24 * 365


def issue_user_token(settings: Settings, user_id: str, hours: float) -> str:
    """Return a JWT (HS256) for `user_id` that the user API accepts for so many hours."""
    now = utc_now()
    claims = {"sub": user_id, "iat": now, "exp": now + timedelta(hours=hours)}
    if settings.jwt_audience:
        claims["aud"] = settings.jwt_audience
    return jwt.encode(claims, settings.jwt_secret, algorithm="HS256")


@click.command()
@click.option("--user", "user_id", required=True, metavar="ID", help="The user: the token's `sub`.")
@click.option(
    "--hours",
    type=click.FloatRange(0, _LONGEST_HOURS, min_open=True),
    default=24.0,
    show_default=True,
    help="How long it lasts.",
)
def token(user_id: str, hours: float) -> None:
    """Print a token of a user for the user API. For development: in production the learning app issues them."""
    fault = identifier_fault(user_id)
    if fault is not None:
        raise Failure(f"--user: {fault}", BAD_INPUT)
    click.echo(issue_user_token(load_settings(), user_id, hours))
