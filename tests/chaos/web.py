"""`gunicorn tests.chaos.web:create_app()`: the web application with crash points around its commits."""

from __future__ import annotations

import os
from pathlib import Path

from flask import Flask

from aijobs.web import factory
from tests.chaos import crashes


def create_app() -> Flask:
    """Create the application and install the crash points."""
    points = crashes.CrashPoints(Path(os.environ["CHAOS_FOLDER"]), os.environ["CHAOS_NAME"])
    crashes.install_commits(points, "web")
    return factory.create_app()
