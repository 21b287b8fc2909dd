"""Stage 5, COMPLETE: end the run. The job's end was announced when it was committed."""

from __future__ import annotations

from aijobs.engine.run import Run
from aijobs.jobs.claim import KnownJob
from aijobs.jobs.status import FINAL
from aijobs.logs import get_logger

logger = get_logger(__name__)


def complete(run: Run, job: KnownJob, error_code: str | None = None) -> None:
    """End the run as `job` says; write the line of an attempt that another follows."""
    if job.lifecycle_status in FINAL:
        run.end(job.lifecycle_status)
        return
    logger.info("job.retry_scheduled", outputHash=job.output_hash, **run.fields(job, error_code))
    run.end("retry_scheduled")
