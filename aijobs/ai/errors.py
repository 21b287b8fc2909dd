"""Errors of the models' room that are no fault of the job."""

from __future__ import annotations

from datetime import timedelta

from aijobs.errors import AijobsError


class ProvidersBusy(AijobsError):
    """No provider of the job's route is to be asked just now: its breaker is open, or all its calls are taken. Nothing
    went wrong with the job, which waits `wait` uncounted.

    `crowded`: one of them is well and answers others, so that this is a wait in line and no outage.
    """

    def __init__(self, wait: timedelta, *, crowded: bool = False) -> None:
        super().__init__(f"no provider is to be asked for {wait.total_seconds():.0f} s")
        self.wait, self.crowded = wait, crowded
