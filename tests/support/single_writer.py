"""Catches, while tests run, any write of a job's `lifecycle_status` that the lifecycle repository didn't make.

A static rule sees names; this sees what is done: the SQL that reaches a driver, and the attribute that is set on an
object. Who does it is read from the stack: the innermost module of ours that isn't one of the carriers, which write
what they are given. Tests themselves may write what they like.
"""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

from sqlalchemy import Engine, event

from aijobs.jobs.models import AiJob

WRITER = "aijobs.jobs.lifecycle."
"""The package; its `changes` carries what the other modules decide."""
CARRIERS = frozenset({"aijobs.db.database", "aijobs.db.statements", "aijobs.jobs.lifecycle.changes", __name__})
COLUMN = AiJob.lifecycle_status.key
_OURS = re.compile(r"(aijobs|tests|bench)\.")
_WRITES = re.compile(
    rf"\s*(?:/\*.*?\*/\s*)*(?:update\s+[\"`]?ai_jobs\b.*\bset\b.*?[\"`\s,.]{COLUMN}[\"`]?\s*="
    rf"|(?:insert|replace)\b.*?\binto\s+[\"`]?ai_jobs\b.*\b{COLUMN}\b)",
    re.IGNORECASE | re.DOTALL,
)


class SecondWriter(AssertionError):
    """Something else than the lifecycle repository wrote a job's state."""


def writes_the_state(statement: str) -> bool:
    """Whether a statement sets the column; one that only has it in its WHERE doesn't."""
    head = re.split(r"\bwhere\b", statement, maxsplit=1, flags=re.IGNORECASE)[0]
    return COLUMN in head and _WRITES.match(head) is not None


class Watch:
    """What was caught so far; `install` once a process."""

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
        """What was caught, and forget it."""
        caught, self.caught = self.caught, []
        return caught

    def _before_statement(self, _connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if writes_the_state(statement):
            self._judge(sys._getframe(1), "a statement")

    def _before_attribute(self, _job: AiJob, _value: Any, _old: Any, _initiator: Any) -> None:
        self._judge(sys._getframe(1), "an attribute")

    def _judge(self, frame: FrameType | None, what: str) -> None:
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
