"""Stage 5, COMPLETE: tell the process and the log."""

from __future__ import annotations

from aijobs.engine.run import Run
from aijobs.events import DomainEvent, EventBus
from aijobs.jobs.claim import KnownJob
from aijobs.jobs.status import FINAL
from aijobs.logs import get_logger
from aijobs.outbox.models import END_EVENTS

logger = get_logger(__name__)


def complete(bus: EventBus, run: Run, job: KnownJob, error_code: str | None = None) -> None:
    """Write the attempt's line, publish the end event of a job that ended, after the commit, and end the run."""
    word = job.lifecycle_status if job.lifecycle_status in FINAL else "retry_scheduled"
    level = logger.info if error_code is None or job.lifecycle_status not in FINAL else logger.warning
    level(f"job.{word}", outputHash=job.output_hash, **run.fields(job, error_code))
    if job.lifecycle_status in FINAL:
        payload = {"jobType": job.job_type, "lifecycleStatus": job.lifecycle_status, "errorCode": job.error_code}
        bus.publish(DomainEvent(END_EVENTS[job.lifecycle_status], job.id, payload))
    run.end(word)
