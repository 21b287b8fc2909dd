"""The passes of the maintenance consumers: on time, failing, or overdue."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.clock import iso
from aijobs.db.clock import Clock, read_clock
from aijobs.jobs.models import NOTE_S, PassRun
from aijobs.monitor.views import PassRow

PERIODS, LEAST = 3, timedelta(minutes=1)
"""A pass is overdue after so many periods without a success, and at least this time: a dispatcher may have a
backlog.
"""
SLACK = timedelta(seconds=NOTE_S)
"""A success may be recorded so much later, if the pass works as before."""


def read_passes(session: Session, clock: Clock, names: Sequence[str]) -> tuple[PassRow, ...]:
    """Return each of the named passes, in that order. One that never ran is overdue."""
    now = read_clock(session, clock)
    noted = {row.name: row for row in session.execute(select(PassRun)).scalars()}

    def told(name: str) -> PassRow:
        row = noted.get(name)
        if row is None:
            return PassRow(name, "overdue", None, None, 0, None)
        patience = max(PERIODS * timedelta(milliseconds=row.period_ms), LEAST) + SLACK
        state = "failing" if row.failures else "on_time"
        if row.succeeded_at is None or now - row.succeeded_at > patience:
            state = "overdue"
        return PassRow(
            name,
            state,
            iso(row.succeeded_at) if row.succeeded_at else None,
            iso(row.failed_at) if row.failed_at else None,
            row.failures,
            row.error if row.failures else None,
        )

    return tuple(told(name) for name in names)
