"""What a worker holds, for how long, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from aijobs.errors import describe
from aijobs.jobs.models import AiJob
from aijobs.logs import LoggedJob


@dataclass(frozen=True)
class Claim:
    """What a worker holds while it runs a job. The token is `{instance}/{random}`, never used twice."""

    job_id: str
    token: str
    attempt_no: int
    event_id: str | None = field(default=None, compare=False)
    """The outbox event that asked for the attempt, if it is known."""

    @property
    def instance(self) -> str:
        return self.token.rpartition("/")[0]


def claim_of(job: AiJob, event_id: str | None = None) -> Claim:
    """The claim under which `job` is held. `ValueError` where nobody holds it."""
    if job.locked_by is None:
        raise ValueError(f"job {job.id} is held by nobody")
    return Claim(job.id, job.locked_by, job.attempt_no, event_id)


class KnownJob(LoggedJob, Protocol):
    """What a change of a job tells of it."""

    event_seq: int
    output_hash: str | None


@dataclass
class LockedRow:
    """What `lock_row` reads of a held job: what its end is to tell, and its saved output, None where it has none.

    Not the whole row: its forty columns are dear to read, and nobody needs the others then.
    """

    id: str
    job_type: str
    queue_name: str
    attempt_no: int
    lifecycle_status: str
    error_code: str | None
    event_seq: int
    output_hash: str | None
    validated_output: Any = field(repr=False)


@dataclass(frozen=True)
class Locked:
    """A job that was just taken, with what it works on."""

    job: AiJob
    event_id: str | None
    """Of the outbox event that asked for this attempt."""
    content: str | None = field(repr=False)
    """Its input as JSON; None where that has expired, or where its output is saved already. Not read yet: what is no
    JSON, or none for us, fails the attempt, and not the lock, which would be tried again for ever."""


@dataclass(frozen=True)
class JobErrorInfo:
    """Why a job failed: its code, what the user reads (in English) and what operators read."""

    code: str
    public_message: str
    internal_message: str = ""

    @classmethod
    def of(cls, code: str, internal_message: str = "") -> JobErrorInfo:
        """The info of a code, with the code's own public message."""
        return cls(code, describe(code).en, internal_message)


@dataclass(frozen=True)
class Lease:
    """How long a lock lasts, and how long after its end it counts as lost."""

    length: timedelta
    grace: timedelta

    @property
    def threshold_ms(self) -> int:
        """Milliseconds from the last renewal until a takeover."""
        return round((self.length + self.grace).total_seconds() * 1000)
