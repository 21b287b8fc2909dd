"""`gunicorn tests.chaos.web:create_app()`: the web application, in a process that can be told to die at a COMMIT."""

from __future__ import annotations

import os
from pathlib import Path

from flask import Flask

from aijobs.web import factory
from tests.chaos import crashes


def create_app() -> Flask:
    """The application as it is, with crash points around its commits."""
    points = crashes.CrashPoints(Path(os.environ["CHAOS_FOLDER"]), os.environ["CHAOS_NAME"])
    crashes.install_commits(points, "web")
    return factory.create_app()
