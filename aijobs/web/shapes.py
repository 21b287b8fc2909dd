"""What API and command line show alike."""

from __future__ import annotations

from dataclasses import replace

from aijobs.monitor.views import Wait
from aijobs.web.explanations import WAITS


def explained(wait: Wait) -> Wait:
    """`wait` with its explanation in the reader's language."""
    why = WAITS[wait.reason]
    return replace(wait, explanation=f"{why.what} {why.advice}")
