"""Times and durations on the Python side.

The *database's* clock (`aijobs.db.clock.DatabaseClock`) decides about leases, due times and claims. This module is for
log lines, token expiry and texts.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


def utc_now() -> datetime:
    """Return the current time, aware, in UTC."""
    return datetime.now(UTC)


def iso(at: datetime) -> str:
    """Return `at` as ISO 8601 in UTC with a `Z`: milliseconds, or microseconds if there are any."""
    at = at.astimezone(UTC)
    text = at.isoformat(timespec="milliseconds" if at.microsecond % 1000 == 0 else "microseconds")
    return text.replace("+00:00", "Z")


def parse_iso(text: str) -> datetime:
    """Return the time of an ISO 8601 text, in UTC. `ValueError` without an offset."""
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError("no UTC offset; write 2026-01-31T08:00:00Z")
    return at.astimezone(UTC)


class Stopwatch:
    """Measures elapsed time with the monotonic clock, which no change of the wall clock affects."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def ms(self) -> int:
        return int(self.seconds * 1000)
