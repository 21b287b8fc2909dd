"""The application for servers. The import fails in one line if settings, schema or stored keys don't fit."""

from __future__ import annotations

import sys
from typing import NoReturn

from flask import Flask
from sqlalchemy.exc import OperationalError

from aijobs.errors import AijobsError, SettingsError
from aijobs.queues.probe import refuse_unsupported
from aijobs.settings import Settings
from aijobs.web.factory import create_app
from aijobs.wiring.services import Services

BOOT_ERROR = 3
"""The exit code that tells gunicorn's master not to try again (its `WORKER_BOOT_ERROR`)."""


def build_app() -> Flask:
    """Return the application after checking the database. Otherwise end the process with one line.

    Under the `flask` command the database isn't checked, because `flask db upgrade` creates it.
    """
    try:
        settings = Settings.load()
        _check_keys(settings)
        app = create_app(settings)
        if not settings.run_by_flask:
            _check_parts(app.extensions["aijobs"])
    except AijobsError as error:
        _refuse(str(error))
    except OperationalError as error:
        _refuse(f"the database at AIJOBS_DATABASE_URL doesn't answer ({type(error.orig).__name__})")
    return app


def _check_parts(services: Services) -> None:
    """Raise `SettingsError` for an unusable database or broker. A broker may be away."""
    services.check_start()
    try:
        refuse_unsupported(services.broker.client)
    finally:
        services.broker.close()  # Servers fork after this import.


def _check_keys(settings: Settings) -> None:
    """Refuse development keys unless AIJOBS_ENV was set: only the server's command line knows where it listens.

    `aijobs up` sets it for its web process; the `flask` command is for development.
    """
    if settings.development_keys and not (settings.env_was_set or settings.run_by_flask):
        raise SettingsError(
            "the web server refuses to start on development keys: set AIJOBS_ENV to production or development"
        )


def _refuse(why: str) -> NoReturn:
    print(f"aijobs: {why}", file=sys.stderr, flush=True)
    sys.exit(BOOT_ERROR)


app = build_app()
