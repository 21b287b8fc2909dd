"""Read the outbox for people: waiting, dead and unknown events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock, read_clock
from aijobs.monitor.counts import capped_count
from aijobs.monitor.keyset import Cursors, Keyset, Page
from aijobs.monitor.views import Count, OutboxRow, OutboxStatus
from aijobs.outbox.models import OutboxEvent, OutboxState

UNKNOWN_EVENT_TYPE = "UNKNOWN_EVENT_TYPE"
SHOWN = 50

OUTBOX_COLUMNS = tuple(
    OutboxEvent.aggregate_id if name == "job_id" else getattr(OutboxEvent, name)
    for name in OutboxRow.__dataclass_fields__
)


@dataclass(frozen=True)
class OutboxReads:
    """Reads the outbox in the caller's session."""

    clock: Clock
    cursors: Cursors

    def find_page(
        self, session: Session, status: str | None, event_type: str | None, cursor: str | None, limit: int
    ) -> Page[OutboxRow]:
        """Return a page of events, newest first; of one status, the latest due time first."""
        columns: tuple[Any, ...] = (OutboxEvent.id,)
        query = select(*OUTBOX_COLUMNS)
        if status is not None:
            query, columns = query.where(OutboxEvent.status == status), (OutboxEvent.available_at, OutboxEvent.id)
        if event_type is not None:
            query = query.where(OutboxEvent.event_type == event_type)
        keyset = Keyset(f"outbox:{len(columns)}", columns)
        found = session.execute(keyset.page(query, cursor, limit, self.cursors)).all()
        rows = [OutboxRow(*row) for row in found[:limit]]
        behind = None
        if len(found) > limit:
            last = rows[-1]
            behind = keyset.cursor((last.available_at, last.id) if status is not None else (last.id,), self.cursors)
        return Page(tuple(rows), behind)

    def find(self, session: Session, event_id: str) -> OutboxRow | None:
        """Return one event, or None."""
        row = session.execute(select(*OUTBOX_COLUMNS).where(OutboxEvent.id == event_id)).one_or_none()
        return None if row is None else OutboxRow(*row)

    def read_status(self, session: Session) -> OutboxStatus:
        """Return counts, lag, dead and unknown events, in five statements."""
        now = read_clock(session, self.clock)
        oldest = session.execute(
            select(OutboxEvent.available_at)
            .where(OutboxEvent.status == OutboxState.PENDING, OutboxEvent.available_at <= self.clock.now())
            .order_by(OutboxEvent.available_at)
            .limit(1)
        ).scalar()
        unknown = (OutboxEvent.status == OutboxState.PUBLISHED, OutboxEvent.last_error == UNKNOWN_EVENT_TYPE)
        return OutboxStatus(
            counts=_count_by_status(session),
            oldest_pending_at=oldest,
            lag_s=max(0.0, (now - oldest).total_seconds()) if oldest else 0.0,
            dead=_newest(session, OutboxEvent.status == OutboxState.DEAD),
            unknown_types=_newest(session, *unknown),
        )


def _newest(session: Session, *conditions: Any) -> tuple[OutboxRow, ...]:
    query = select(*OUTBOX_COLUMNS).where(*conditions).order_by(OutboxEvent.id.desc()).limit(SHOWN)
    return tuple(OutboxRow(*row) for row in session.execute(query))


def _count_by_status(session: Session) -> dict[str, Count]:
    columns = [capped_count(OutboxEvent, OutboxEvent.status == word) for word in OutboxState]
    return dict(zip(OutboxState, (Count(n) for n in session.execute(select(*columns)).one()), strict=True))
