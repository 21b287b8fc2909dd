"""Find out whether a COMMIT whose answer was lost took effect: each returns a result if it did, otherwise None."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.orm import Session

from aijobs.jobs.lease import Lease
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import FINAL, JobState

Confirm = Callable[[Session], AiJob | None]


def ended(lease: Lease, *states: str) -> Confirm:
    """This attempt ended the job, in one of `states` (any)."""

    def read(session: Session) -> AiJob | None:
        job = session.get(AiJob, lease.job_id)
        return job if job and job.lifecycle_status in (states or FINAL) and job.attempt_no == lease.attempt_no else None

    return read


def saved(lease: Lease, output_hash: str) -> Callable[[Session], str | None]:
    """The output is saved, and this attempt still holds the job: its hash."""

    def read(session: Session) -> str | None:
        job = session.get(AiJob, lease.job_id)
        return output_hash if job and job.locked_by == lease.token and job.output_hash == output_hash else None

    return read


def cancelled(job_id: str) -> Confirm:
    """The job is cancelled."""

    def read(session: Session) -> AiJob | None:
        job = session.get(AiJob, job_id)
        return job if job and job.lifecycle_status == JobState.CANCELLED else None

    return read


def freed(lease: Lease) -> Confirm:
    """The lease doesn't hold the job any more."""

    def read(session: Session) -> AiJob | None:
        job = session.get(AiJob, lease.job_id)
        return job if job and job.locked_by != lease.token else None

    return read
