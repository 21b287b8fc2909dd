"""Read queues for people: waiting jobs, their age, workers, and pauses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.definitions.definition import QUEUES
from aijobs.errors import BrokerUnavailable
from aijobs.jobs.conditions import FREED
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import JobState
from aijobs.monitor.counts import capped_count
from aijobs.monitor.views import Count, QueuePaused, QueueStatus
from aijobs.monitor.workers import BrokerProbe, PresenceSource, is_late
from aijobs.outbox.models import QueuePause


@dataclass(frozen=True)
class QueueReads:
    """Reads the database in two statements. The broker's part is None while it is away."""

    clock: Clock
    broker: BrokerProbe
    presence: PresenceSource
    late_after_s: float

    def read_statuses(self, session: Session) -> list[QueueStatus]:
        """Return all job queues."""
        pauses = {
            pause.queue_name: QueuePaused(pause.reason, pause.paused_by, pause.paused_at)
            for pause in session.execute(select(QueuePause)).scalars()
        }
        columns: list[Any] = [self.clock.now().label("now")]
        for name in QUEUES:
            columns += _measures(name)
        now, *measured = session.execute(select(*columns)).one()
        broker = self.broker.probe()
        workers = self._count_workers()
        found = []
        for place, name in enumerate(QUEUES):
            queued, retrying, active, oldest = measured[place * 4 : place * 4 + 4]
            found.append(
                QueueStatus(
                    queue_name=name,
                    broker=broker.of(name).state,
                    broker_cause=broker.of(name).cause,
                    broker_depth=broker.of(name).depth,
                    queued=Count(queued),
                    retrying=Count(retrying),
                    active=Count(active),
                    oldest_queued_at=oldest,
                    oldest_age_s=_age(now, oldest),
                    workers=None if workers is None else workers[name],
                    paused=pauses.get(name),
                )
            )
        return found

    def _count_workers(self) -> Counter[str] | None:
        """Return the number of workers by queue, without those that stopped writing heartbeats: they may be dead."""
        try:
            return Counter(beat.queue for beat in self.presence.read() if not is_late(beat, self.late_after_s))
        except BrokerUnavailable:
            return None


def _measures(queue_name: str) -> list[Any]:
    """Build the columns queued, retrying, active, and the time of the oldest queued job."""
    oldest = (
        select(AiJob.created_at)
        .where(AiJob.queue_name == queue_name, AiJob.lifecycle_status == JobState.QUEUED)
        .order_by(AiJob.created_at, AiJob.id)
        .limit(1)
        .scalar_subquery()
    )
    return [
        _count(queue_name, AiJob.lifecycle_status == JobState.QUEUED),
        _count(queue_name, FREED),
        _count(queue_name, AiJob.lifecycle_status == JobState.RUNNING, AiJob.locked_by.is_not(None)),
        oldest,
    ]


def _count(queue_name: str, *conditions: Any) -> Any:
    return capped_count(AiJob, AiJob.queue_name == queue_name, *conditions)


def _age(now: datetime, since: datetime | None) -> float | None:
    return None if since is None else max(0.0, (now - since).total_seconds())
