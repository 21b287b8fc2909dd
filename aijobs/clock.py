"""Instants and durations on the Python side.

Leases, due times and claims are judged by the *database's* clock (`aijobs.db.clock.DatabaseClock`). What is here serves
what never decides anything: the age of a line in a log, the expiry of a token, the text of an answer.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


def utc_now() -> datetime:
    """The present instant, aware, in UTC."""
    return datetime.now(UTC)


def iso(at: datetime) -> str:
    """`at` as ISO 8601 in UTC with a `Z`: milliseconds, or microseconds where there are any."""
    at = at.astimezone(UTC)
    text = at.isoformat(timespec="milliseconds" if at.microsecond % 1000 == 0 else "microseconds")
    return text.replace("+00:00", "Z")


def parse_iso(text: str) -> datetime:
    """The instant that an ISO 8601 text with an offset names, in UTC. `ValueError` without an offset."""
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError("no UTC offset; write 2026-01-31T08:00:00Z")
    return at.astimezone(UTC)


class Stopwatch:
    """Elapsed time on the monotonic clock, which a stepped wall clock does not move."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def ms(self) -> int:
        return int(self.seconds * 1000)
