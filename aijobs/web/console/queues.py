"""Queues: what waits, how long, who works on it."""

from __future__ import annotations

from flask.typing import ResponseReturnValue

from aijobs.web.auth import require_right
from aijobs.web.console import blueprint
from aijobs.web.console.pages import render
from aijobs.web.context import services


@blueprint.get("/queues")
@require_right("view")
def queues() -> ResponseReturnValue:
    """All job queues."""
    statuses = services().monitor.queue_statuses()
    return render("console/queues/index.html", "console/queues/_changes.html", queues=statuses)
