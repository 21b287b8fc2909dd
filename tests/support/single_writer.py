"""A watch for writes of a job's `lifecycle_status` outside the lifecycle repository, while tests run.

It sees the SQL that reaches a driver and attributes that are set on a job. The writer is the innermost module of this
repository on the stack, except the carriers, which write on behalf of their callers. Tests may write anything.
"""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

from sqlalchemy import Engine, event

from aijobs.jobs.models import AiJob

WRITER = "aijobs.jobs.lifecycle."
"""The only package that may write the state."""
CARRIERS = frozenset({"aijobs.db.database", "aijobs.db.statements", "aijobs.jobs.lifecycle.changes", __name__})
COLUMN = AiJob.lifecycle_status.key
_OURS = re.compile(r"(aijobs|tests|bench)\.")
_WRITES = re.compile(
    rf"\s*(?:/\*.*?\*/\s*)*(?:update\s+[\"`]?ai_jobs\b.*\bset\b.*?[\"`\s,.]{COLUMN}[\"`]?\s*="
    rf"|(?:insert|replace)\b.*?\binto\s+[\"`]?ai_jobs\b.*\b{COLUMN}\b)",
    re.IGNORECASE | re.DOTALL,
)


class SecondWriter(AssertionError):
    """Code outside the lifecycle repository wrote a job's state."""


def writes_the_state(statement: str) -> bool:
    """Return whether a statement sets the column, not only compares it in its WHERE clause."""
    head = re.split(r"\bwhere\b", statement, maxsplit=1, flags=re.IGNORECASE)[0]
    return COLUMN in head and _WRITES.match(head) is not None


class Watch:
    """Collects the violations of this process. Call `install` once."""

    def __init__(self) -> None:
        self.caught: list[str] = []

    def install(self) -> None:
        event.listen(Engine, "before_cursor_execute", self._before_statement)
        # The constructor sets attributes too: `AiJob(lifecycle_status=…)`.
        event.listen(AiJob.lifecycle_status, "set", self._before_attribute)

    def remove(self) -> None:
        event.remove(Engine, "before_cursor_execute", self._before_statement)
        event.remove(AiJob.lifecycle_status, "set", self._before_attribute)

    def take(self) -> list[str]:
        """Return the violations and forget them."""
        caught, self.caught = self.caught, []
        return caught

    def _before_statement(self, _connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if writes_the_state(statement):
            self._check(sys._getframe(1), "a statement")

    def _before_attribute(self, _job: AiJob, _value: Any, _old: Any, _initiator: Any) -> None:
        self._check(sys._getframe(1), "an attribute")

    def _check(self, frame: FrameType | None, what: str) -> None:
        who = _innermost(frame)
        if who is not None and not who.startswith(WRITER) and who.startswith("aijobs."):
            self.caught.append(f"{who} writes {COLUMN} by {what}")
            raise SecondWriter(self.caught[-1])


def _innermost(frame: FrameType | None) -> str | None:
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if _OURS.match(name) and name not in CARRIERS:
            return str(name)
        frame = frame.f_back
    return None
