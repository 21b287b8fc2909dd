"""Workers: who is alive, who is late, and who is gone with jobs in hand."""

from __future__ import annotations

from datetime import datetime

from flask.typing import ResponseReturnValue

from aijobs.clock import parse_iso
from aijobs.web.auth import require_right
from aijobs.web.console import blueprint
from aijobs.web.console.pages import render
from aijobs.web.context import services


@blueprint.get("/workers")
@require_right("view")
def workers() -> ResponseReturnValue:
    """All workers that are known."""
    known = services().monitor.workers()
    return render(
        "console/workers/index.html",
        "console/workers/_changes.html",
        known=known,
        started={row.instance_id: _instant(row.started_at) for row in known.workers},
    )


def _instant(text: str | None) -> datetime | None:
    """What a heartbeat calls its start; None for what is no time, as anybody may write to the broker."""
    try:
        return parse_iso(text) if text else None
    except (ValueError, OverflowError):
        return None
