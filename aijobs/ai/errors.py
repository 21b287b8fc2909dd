"""Errors of calls that are no fault of the job."""

from __future__ import annotations

from datetime import timedelta

from aijobs.errors import AijobsError


class ProvidersBusy(AijobsError):
    """No provider of the job's route is available: its breaker is open, or all its calls are in use. The job is
    postponed for `wait`, and the attempt doesn't count.

    `crowded`: one of them works and serves other jobs, so this is a queue and no outage.
    """

    def __init__(self, wait: timedelta, *, crowded: bool = False) -> None:
        super().__init__(f"no provider is to be asked for {wait.total_seconds():.0f} s")
        self.wait, self.crowded = wait, crowded
