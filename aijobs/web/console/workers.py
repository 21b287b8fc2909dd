"""Workers: who is alive, who is late, and who is gone with jobs in hand."""

from __future__ import annotations

from flask.typing import ResponseReturnValue

from aijobs.web.auth import require_right
from aijobs.web.console import blueprint
from aijobs.web.console.pages import render
from aijobs.web.context import services


@blueprint.get("/workers")
@require_right("view")
def workers() -> ResponseReturnValue:
    """All workers that are known."""
    return render(
        "console/workers/index.html",
        "console/workers/_changes.html",
        known=services().monitor.workers(),
    )
