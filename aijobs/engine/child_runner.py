"""The child's side of an attempt in a child process: read the held job, run the attempt, answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aijobs.engine.attempts import Attempts
from aijobs.engine.child import Answer
from aijobs.engine.outcome import Outcome
from aijobs.engine.prepare import Prepare
from aijobs.events import DomainEvent, EventBus
from aijobs.jobs.lease import Lease
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.status import END_EVENTS
from aijobs.logs import get_logger, job_fields, where

logger = get_logger(__name__)


class ChildRunner:
    """Runs attempts that the parent has locked. The parent renews leases, and kills this process to stop an attempt."""

    def __init__(self, lifecycle: LifecycleRepository, prepare: Prepare, attempts: Attempts, bus: EventBus) -> None:
        self._lifecycle, self._prepare, self._attempts = lifecycle, prepare, attempts
        self._events: list[tuple[str, str, dict[str, Any]]] = []
        for event_type in END_EVENTS.values():
            bus.subscribe(event_type, self._note)

    def run(self, order: Mapping[str, Any]) -> Answer:
        """Run one attempt to its end. Return its outcome and the events that were published meanwhile."""
        self._events.clear()
        return {"outcome": self._run(order).value, "events": self._events}

    def _run(self, order: Mapping[str, Any]) -> Outcome:
        lease = Lease(*order["lease"])
        try:
            locked = self._lifecycle.find_held(lease, order["event"])
        except Exception as error:  # The database is away: the lease runs out, and the reaper takes the job.
            fields = job_fields(jobId=lease.job_id, attemptNo=lease.attempt_no)
            logger.error("suspects.not_found", error=type(error).__name__, where=where(error), **fields)
            return Outcome.LOST
        if locked is None:
            return Outcome.LOST
        run = self._prepare.begin(locked, order["seconds"])
        self._attempts.run(run)
        return run.outcome or Outcome.LOST

    def _note(self, event: DomainEvent) -> None:
        self._events.append((event.type, event.job_id, dict(event.payload)))
