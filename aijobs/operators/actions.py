"""The actions of operators on jobs and events, each with its row in the audit log.

Console, API and command line call only these. They check rights before, and show the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aijobs.ai.calling.breaker import BreakerState
from aijobs.errors import ApiError, BrokerUnavailable
from aijobs.jobs.requests import CreatedJob
from aijobs.monitor.views import JobRow, OutboxRow, Revealed
from aijobs.operators.audit import JOB, OUTBOX_EVENT, PROVIDER, Actor, AuditTrail

if TYPE_CHECKING:
    from aijobs.wiring.services import Services


@dataclass(frozen=True)
class Cancelled:
    """A job before a cancel was requested, and after."""

    before: JobRow
    after: JobRow


class Operating:
    """The actions of one actor. `JOB_NOT_FOUND` and `NOT_FOUND` leave no audit row."""

    def __init__(self, services: Services, actor: Actor) -> None:
        self._services, self._actor = services, actor
        self._trail = AuditTrail(services.database, services.clock, actor)

    def retry(self, job_id: str, reason: str | None = None) -> CreatedJob:
        """Run a failed or cancelled job again as a new one; see `AiJobService.retry`."""
        before = self._job(job_id)
        with self._trail.entry("job.retry", JOB, job_id, reason=reason, before=_job_state(before)) as entry:
            created = self._services.jobs.retry(job_id, self._actor.name)
            entry.after = {"childJobId": created.job.id, "created": created.created}
        return created

    def cancel(self, job_id: str, reason: str | None = None) -> Cancelled:
        """Request the cancel of a job; see `AiJobService.cancel`."""
        before = self._job(job_id)
        with self._trail.entry("job.cancel", JOB, job_id, reason=reason, before=_job_state(before)) as entry:
            self._services.jobs.cancel(job_id, self._actor.name)
            after = self._job(job_id)
            entry.after = _job_state(after)
        return Cancelled(before, after)

    def reveal(self, job_id: str, reason: str) -> Revealed:
        """Return a job's input and output. The audit row has the reason."""
        before = self._job(job_id)
        with self._trail.entry("job.reveal", JOB, job_id, reason=reason, before=_job_state(before)) as entry:
            revealed = self._services.monitor.reveal(job_id)
            entry.after = {
                "snapshot": revealed.snapshot is not None,
                "validatedOutput": revealed.validated_output is not None,
            }
        return revealed

    def requeue(self, event_id: str, reason: str | None = None) -> OutboxRow:
        """Make a dead end event pending again; see `OutboxRepository.requeue`."""
        before = self._services.monitor.get_event(event_id)
        with self._trail.entry(
            "outbox.requeue", OUTBOX_EVENT, event_id, reason=reason, before=_event_state(before)
        ) as entry:
            self._services.outbox.requeue(event_id)
            after = self._services.monitor.get_event(event_id)
            entry.after = _event_state(after)
        return after

    def close_breaker(self, provider: str, reason: str | None = None) -> BreakerState:
        """Close a provider's breaker, so that calls go through again. `SERVICE_BUSY` while Redis is away."""
        before = self._services.monitor.get_breaker(provider)
        with self._trail.entry(
            "provider.close_breaker", PROVIDER, provider, reason=reason, before=_breaker_state(before)
        ) as entry:
            try:
                self._services.breaker.reset(before.scope)
            except BrokerUnavailable:
                raise ApiError("SERVICE_BUSY") from None
            after = self._services.monitor.get_breaker(provider)
            entry.after = _breaker_state(after)
        return after

    def _job(self, job_id: str) -> JobRow:
        return self._services.monitor.get_job(job_id).job


def _job_state(job: JobRow) -> dict[str, Any]:
    return {"lifecycleStatus": job.lifecycle_status, "phase": job.phase, "attempt": job.attempt_no}


def _breaker_state(state: BreakerState) -> dict[str, Any]:
    return {"state": state.word, "why": state.why} if state.why else {"state": state.word}


def _event_state(event: OutboxRow) -> dict[str, Any]:
    return {"status": event.status, "jobId": event.job_id}
