"""Build the attempts of a job from its history and its provider calls."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from aijobs.jobs.history import HistoryType
from aijobs.monitor.views import JobDetail

ENDS = (
    HistoryType.RETRY_SCHEDULED,
    HistoryType.RELEASED,
    HistoryType.POSTPONED,
    HistoryType.LEASE_LOST,
    HistoryType.SUCCEEDED,
    HistoryType.FAILED,
    HistoryType.CANCELLED,
)


@dataclass(frozen=True)
class Attempt:
    """One attempt. `end` is the type of the history row that ended it; None while it runs."""

    number: int
    started_at: datetime | None
    instance: str | None
    end: str | None
    ended_at: datetime | None
    error_code: str | None
    calls: int

    @property
    def took(self) -> timedelta | None:
        return self.ended_at - self.started_at if self.started_at and self.ended_at else None


def build_attempts(detail: JobDetail) -> list[Attempt]:
    """Return all attempts, oldest first."""
    numbers = sorted({entry.attempt_no for entry in detail.history if entry.type == HistoryType.LOCKED})
    return [_attempt(detail, number) for number in numbers]


def _attempt(detail: JobDetail, number: int) -> Attempt:
    entries = [entry for entry in detail.history if entry.attempt_no == number]
    locked = next(entry for entry in entries if entry.type == HistoryType.LOCKED)
    end = next((entry for entry in entries if entry.type in ENDS and entry.seq > locked.seq), None)
    return Attempt(
        number=number,
        started_at=locked.at,
        instance=locked.instance,
        end=end.type if end else None,
        ended_at=end.at if end else None,
        error_code=end.error_code if end else None,
        calls=sum(1 for call in detail.usage if call.attempt_no == number),
    )
