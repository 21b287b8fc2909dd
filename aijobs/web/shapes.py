"""What API and command line show alike as JSON. A key without a value is left out."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from aijobs.ai.calling.breaker import BreakerState
from aijobs.clock import iso
from aijobs.monitor.views import Wait
from aijobs.web.explanations import WAITS


def present(**fields: Any) -> dict[str, Any]:
    """The fields that have a value; instants as text."""
    return {
        name: iso(value) if isinstance(value, datetime) else value
        for name, value in fields.items()
        if value is not None
    }


def to_ms(seconds: float | None) -> int | None:
    """Whole milliseconds."""
    return None if seconds is None else round(seconds * 1000)


def breaker(state: BreakerState) -> dict[str, Any]:
    """A circuit breaker."""
    return present(
        scope=state.scope,
        state=state.word,
        failures=state.failures,
        opened=state.opened,
        openForMs=to_ms(state.open_for.total_seconds()) if state.open_for else None,
        since=state.since,
        why=state.why,
        probing=state.probing,
    )


def waiting(wait: Wait) -> dict[str, Any]:
    """Why a job is where it is, in a word and in words."""
    why = WAITS[wait.reason]
    return present(
        reason=wait.reason,
        explanation=f"{why.what} {why.advice}",
        cause=wait.cause,
        until=wait.until,
        breakers=[breaker(state) for state in wait.breakers] or None,
    )
