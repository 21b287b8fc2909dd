"""Stage 5, COMPLETE: tell the process and the log."""

from __future__ import annotations

from aijobs.engine.run import Run
from aijobs.engine.token import TIMEOUT
from aijobs.events import DomainEvent, EventBus
from aijobs.jobs.claim import KnownJob
from aijobs.jobs.status import FINAL
from aijobs.logs import get_logger
from aijobs.outbox.models import END_EVENTS

logger = get_logger(__name__)


def complete(bus: EventBus, run: Run, job: KnownJob, error_code: str | None = None) -> None:
    """Write the attempt's line, publish the end event of a job that ended, after the commit, and end the run.

    An attempt that ran out of time is a warning with its limit, also if another attempt follows.
    """
    word = job.lifecycle_status if job.lifecycle_status in FINAL else "retry_scheduled"
    limit = {"limitMs": run.definition.execution.timeout_ms} if error_code == TIMEOUT else {}
    is_trouble = error_code is not None and (job.lifecycle_status in FINAL or error_code == TIMEOUT)
    level = logger.warning if is_trouble else logger.info
    level(f"job.{word}", outputHash=job.output_hash, **limit, **run.fields(job, error_code))
    if job.lifecycle_status in FINAL:
        payload = {"jobType": job.job_type, "lifecycleStatus": job.lifecycle_status, "errorCode": job.error_code}
        bus.publish(DomainEvent(END_EVENTS[job.lifecycle_status], job.id, payload))
    run.end(word)
