"""The queues page: waiting jobs, their age, and workers."""

from __future__ import annotations

from flask.typing import ResponseReturnValue

from aijobs.operators import rights
from aijobs.web.console.pages import render, whole_page
from aijobs.web.context import services


@whole_page("/queues", rights.VIEW)
def queues() -> ResponseReturnValue:
    """All job queues."""
    statuses = services().monitor.queue_statuses()
    return render("console/queues/index.html", "console/queues/_changes.html", queues=statuses)
