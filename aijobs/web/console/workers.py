"""Workers: who is alive, who is late, and who is gone with jobs in hand; and whether maintenance is done."""

from __future__ import annotations

from flask.typing import ResponseReturnValue

from aijobs.operators import rights
from aijobs.web.console.pages import render, whole_page
from aijobs.web.context import services


@whole_page("/workers", rights.VIEW)
def workers() -> ResponseReturnValue:
    """All workers that are known, and the duties of the maintenance consumers."""
    return render(
        "console/workers/index.html",
        "console/workers/_changes.html",
        known=services().monitor.workers(),
        passes=services().monitor.passes(),
    )
