"""The workers page: alive, late and lost workers, and the passes of maintenance."""

from __future__ import annotations

from flask.typing import ResponseReturnValue

from aijobs.operators import rights
from aijobs.web.console.pages import render, whole_page
from aijobs.web.context import services


@whole_page("/workers", rights.VIEW)
def workers() -> ResponseReturnValue:
    """All known workers, and the passes of the maintenance consumers."""
    return render(
        "console/workers/index.html",
        "console/workers/_changes.html",
        known=services().monitor.workers(),
        passes=services().monitor.passes(),
    )
