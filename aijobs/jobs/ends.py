"""Announce the end of a job, in the log and on the event bus, for each component that ends jobs."""

from __future__ import annotations

from aijobs.events import DomainEvent, EventBus
from aijobs.jobs.lease import KnownJob
from aijobs.jobs.status import END_EVENTS, JobState
from aijobs.logs import get_logger, job_fields

logger = get_logger(__name__)


def announce_end(bus: EventBus, job: KnownJob, *, event_id: str | None = None, duration_ms: int | None = None) -> None:
    """Write the line of a job's end and publish its end event in this process, after the commit. Best effort.

    `event_id` is the outbox event that asked for the attempt that ended the job, `duration_ms` its length; None if no
    attempt did, or if nobody knows.
    """
    level = logger.warning if job.lifecycle_status == JobState.FAILED else logger.info
    fields = job_fields(job, outboxId=event_id, durationMs=duration_ms)
    level(f"job.{job.lifecycle_status}", outputHash=job.output_hash, **fields)
    payload = {"jobType": job.job_type, "lifecycleStatus": job.lifecycle_status, "errorCode": job.error_code}
    bus.publish(DomainEvent(END_EVENTS[job.lifecycle_status], job.id, payload))
