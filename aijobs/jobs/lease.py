"""What a worker holds while it runs a job, for how long, and why a job failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from aijobs.errors import describe
from aijobs.jobs.models import AiJob, CountsLosses
from aijobs.logs import LoggedJob


@dataclass(frozen=True)
class Lease:
    """A worker's temporary right to a job. The token is `{instance}/{random}`, never used twice."""

    job_id: str
    token: str
    attempt_no: int
    event_id: str | None = field(default=None, compare=False)
    """The outbox event that asked for the attempt, if it is known."""

    @property
    def instance(self) -> str:
        return self.token.rpartition("/")[0]


def lease_of(job: AiJob | HeldJob, event_id: str | None = None) -> Lease:
    """Return the lease under which `job` is held. `ValueError` if nobody holds it."""
    if job.locked_by is None:
        raise ValueError(f"job {job.id} is not held")
    return Lease(job.id, job.locked_by, job.attempt_no, event_id)


@dataclass(frozen=True)
class LeasePolicy:
    """How long a lease lasts, and how long after its end it counts as lost."""

    length: timedelta
    grace: timedelta

    @property
    def threshold_ms(self) -> int:
        """Milliseconds from the last renewal until a takeover."""
        return round((self.length + self.grace).total_seconds() * 1000)


class KnownJob(LoggedJob, Protocol):
    """What the log needs of a job that was changed."""

    output_hash: str | None


@dataclass
class HeldJob(CountsLosses):
    """The columns of a held job that its attempt needs. To read all of them as an object costs several times more."""

    id: str
    user_id: str
    job_type: str
    target_type: str
    target_id: str
    root_id: str
    queue_name: str
    priority: int
    idempotency_key: str | None
    prompt_version: str | None
    credential_mode: str
    credential_id: str | None
    lifecycle_status: str
    retry_count: int
    max_retry_count: int
    lost_count: int
    uncharged_losses: int
    attempt_no: int
    locked_by: str | None
    output_hash: str | None
    answer_faults: Any
    error_code: str | None
    created_at: datetime


@dataclass(frozen=True)
class Locked:
    """A job that was just locked, and its input."""

    job: HeldJob
    event_id: str | None
    """The outbox event that asked for this attempt."""
    content: str | None = field(repr=False)
    """The input as JSON; None if it has expired, or if an output is saved. It is parsed later: a broken input fails the
    attempt, and not the lock, which would be tried again for ever."""


@dataclass(frozen=True)
class JobErrorInfo:
    """Why a job failed: its code, what the user reads (in English) and what operators read."""

    code: str
    public_message: str
    internal_message: str = ""

    @classmethod
    def of(cls, code: str, internal_message: str = "") -> JobErrorInfo:
        """Return the info of a code, with the code's own public message."""
        return cls(code, describe(code).en, internal_message)
