"""The workers' ledger: a line before and after each provider call.

Each line is written before the worker continues, so the ledger knows the calls of a dead process too.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ASKED, ANSWERED = "asked", "answered"


def append(path: Path, **line: Any) -> None:
    """Append one line to a file that many processes write to."""
    text = json.dumps({"at": time.time(), "pid": os.getpid(), **line}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of such a file; none if it doesn't exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass
class Call:
    """One provider call, as recorded by its worker."""

    usage_id: str
    job_id: str
    attempt_no: int
    provider: str = "local"
    asked: int = 0
    answered: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)


def read_calls(path: Path) -> dict[str, Call]:
    """Return the calls in the ledger by usage row, in order."""
    calls: dict[str, Call] = {}
    for line in read_lines(path):
        call = calls.setdefault(line["usage"], Call(line["usage"], line["job"], line["attempt"], line["provider"]))
        call.asked += line["what"] == ASKED
        call.answered += line["what"] == ANSWERED
        call.lines.append(line)
    return calls
