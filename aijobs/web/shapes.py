"""Job waits with explanations, for API and command line."""

from __future__ import annotations

from dataclasses import replace

from aijobs.monitor.views import Wait
from aijobs.web.explanations import WAITS


def with_explanation(wait: Wait) -> Wait:
    """Return `wait` with its explanation in the reader's language."""
    why = WAITS[wait.reason]
    return replace(wait, explanation=f"{why.what} {why.advice}")
