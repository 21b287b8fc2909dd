"""Read workers for people: with a heartbeat, late, or lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.clock import iso
from aijobs.definitions.definition import QUEUES
from aijobs.errors import BrokerUnavailable
from aijobs.ids import InstanceId
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import JobState
from aijobs.monitor.views import HeldJob, WorkerRow, Workers
from aijobs.queues.state import BrokerState

MOST_HELD = 1000
STALLED_S = 30.0
"""A worker without a job asks its queue each second. If its heartbeat says that the queue didn't answer for so long, it
takes nothing.
"""


class Heartbeat(Protocol):
    """The last heartbeat of a worker."""

    @property
    def instance_id(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def started_at(self) -> datetime: ...
    @property
    def active_job_count(self) -> int: ...
    @property
    def active_job_ids(self) -> Sequence[str]: ...
    @property
    def slots(self) -> int | None: ...
    @property
    def age_s(self) -> float: ...
    @property
    def asked_s(self) -> float | None: ...
    @property
    def popped_s(self) -> float | None: ...


class PresenceSource(Protocol):
    """Reads heartbeats."""

    def read(self) -> Sequence[Heartbeat]:
        """Return all heartbeats; `BrokerUnavailable`."""
        ...


def is_late(beat: Heartbeat, after_s: float) -> bool:
    """Return whether the heartbeat is too old to trust."""
    return beat.age_s > after_s


class BrokerProbe(Protocol):
    """What is asked of the broker."""

    def probe(self) -> BrokerState:
        """Return the broker's state and the number of waiting messages. Never raises, never waits long."""
        ...


@dataclass(frozen=True)
class WorkerReads:
    """Combines heartbeats with the held jobs in the database, in one statement."""

    broker: BrokerProbe
    presence: PresenceSource
    late_after_s: float

    def read(self, session: Session) -> Workers:
        """Return all workers: with a heartbeat, and those that hold jobs without one."""
        held = _find_held(session)
        broker = self.broker.probe()
        try:
            beats = list(self.presence.read())
        except BrokerUnavailable:
            unknown = tuple(_silent(each, jobs, "unknown") for each, jobs in sorted(held.items()))
            return Workers(True, unknown, broker.state, broker.cause)
        rows = [self._alive(beat, held.pop(beat.instance_id, []), broker) for beat in beats]
        rows.sort(key=lambda row: (row.queue_name, row.host, row.instance_id))
        lost = [_silent(each, jobs, "lost") for each, jobs in sorted(held.items())]
        return Workers(False, (*rows, *lost), broker.state, broker.cause)

    def _alive(self, beat: Heartbeat, held: Sequence[HeldJob], broker: BrokerState) -> WorkerRow:
        """Return the row of a worker with a heartbeat. A late heartbeat's jobs aren't used: it may be dead, and its
        jobs taken over.
        """
        late = is_late(beat, self.late_after_s)
        stalled = _takes_nothing(beat) and bool(broker.of(beat.queue).depth)
        active = [job.id for job in held] if late else beat.active_job_ids
        return WorkerRow(
            instance_id=beat.instance_id,
            queue_name=beat.queue,
            host=beat.host,
            pid=beat.pid,
            started_at=iso(beat.started_at),
            state="late" if late else "stalled" if stalled else "live",
            age_s=beat.age_s,
            active_job_count=len(active) if late else beat.active_job_count,
            active_job_ids=tuple(active),
            holds=tuple(held),
            slots=beat.slots,
            policy_slots=_policy_slots(beat.queue),
            popped_s=beat.popped_s,
        )


def _takes_nothing(beat: Heartbeat) -> bool:
    """Return whether a worker without a job has had no answer of its queue for long. It asks each second."""
    return not beat.active_job_count and beat.asked_s is not None and beat.asked_s - beat.age_s > STALLED_S


def _policy_slots(queue_name: str) -> int | None:
    return QUEUES[queue_name].concurrency if queue_name in QUEUES else None


def _silent(instance_id: str, held: Sequence[HeldJob], state: str) -> WorkerRow:
    """Return the row of a worker that is only known by the jobs that it holds."""
    known = InstanceId.parse(instance_id)
    return WorkerRow(
        instance_id=instance_id,
        queue_name=held[0].queue_name,
        host=known.host if known else "",
        pid=known.pid if known else None,
        started_at=None,
        state=state,
        age_s=None,
        active_job_count=len(held),
        active_job_ids=tuple(job.id for job in held),
        holds=tuple(held),
        slots=None,
        policy_slots=_policy_slots(held[0].queue_name),
    )


def _find_held(session: Session) -> dict[str, list[HeldJob]]:
    """Return held jobs by the instance that holds them."""
    rows = session.execute(
        select(AiJob.locked_by, AiJob.id, AiJob.job_type, AiJob.queue_name, AiJob.attempt_no, AiJob.lock_until)
        .where(AiJob.lifecycle_status == JobState.RUNNING, AiJob.locked_by.is_not(None))
        .order_by(AiJob.created_at, AiJob.id)
        .limit(MOST_HELD)
    )
    held: dict[str, list[HeldJob]] = {}
    for row in rows:
        holder = str(row.locked_by).split("/", 1)[0]
        held.setdefault(holder, []).append(
            HeldJob(row.id, row.job_type, row.queue_name, row.attempt_no, row.lock_until)
        )
    return held
