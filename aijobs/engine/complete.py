"""Stage 5, COMPLETE: end the run. The job's end was announced when it was committed."""

from __future__ import annotations

from aijobs.engine.run import Run
from aijobs.engine.token import TIMEOUT
from aijobs.jobs.claim import KnownJob
from aijobs.jobs.status import FINAL
from aijobs.logs import get_logger

logger = get_logger(__name__)


def complete(run: Run, job: KnownJob, error_code: str | None = None) -> None:
    """End the run as `job` says. Write a line for an attempt that ran out of time, and for one that another follows."""
    if error_code == TIMEOUT:
        logger.warning("job.timed_out", limitMs=run.definition.execution.timeout_ms, **run.fields(job, error_code))
    if job.lifecycle_status in FINAL:
        run.end(job.lifecycle_status)
        return
    logger.info("job.retry_scheduled", outputHash=job.output_hash, **run.fields(job, error_code))
    run.end("retry_scheduled")
