"""How an attempt ends: the `End` that somebody asks for, and the `Outcome` that was written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from aijobs.ai.errors import ProvidersBusy
from aijobs.engine.failure import as_job_error
from aijobs.engine.token import CANCELLED, LOST, TIMEOUT
from aijobs.errors import JobError
from aijobs.jobs.errors import CancelRequested, LifecycleError
from aijobs.jobs.lease import KnownJob
from aijobs.queues import message


class Outcome(StrEnum):
    """What became of a message and its attempt."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RETRY_SCHEDULED = "retry_scheduled"
    POSTPONED = "postponed"
    RELEASED = "released"
    LOST = "lost"
    """The job is another attempt's, or its lease runs out and the reaper takes it."""
    NOT_TAKEN = "not_taken"
    """There was nothing to run."""
    SET_APART = "set_apart"
    """The job is a suspect. It waits in this process until it can run alone."""
    PUT_BACK = message.PUT_BACK
    """The job couldn't be looked at, or no process for it is ready: the message goes back to its queue."""


@dataclass(frozen=True)
class Succeeded:
    """The success is committed."""

    job: KnownJob
    code = None


@dataclass(frozen=True)
class Failed:
    """The attempt raised `cause`, which is `error` to the job. The job is retried, or fails."""

    error: JobError
    cause: BaseException

    @property
    def code(self) -> str:
        return self.error.code


@dataclass(frozen=True)
class Cancelled:
    """A cancel was requested."""

    code = CANCELLED


@dataclass(frozen=True)
class TimedOut:
    """The attempt passed its deadline."""

    code = TIMEOUT


@dataclass(frozen=True)
class Postponed:
    """No provider is available now."""

    busy: ProvidersBusy
    code = "PROVIDER_UNAVAILABLE"


@dataclass(frozen=True)
class Released:
    """The worker stops: the lease is released, and the attempt doesn't count."""

    code = None


@dataclass(frozen=True)
class Died:
    """The child process that ran the attempt died. `charged`: no other job had run in it, so this one is to blame."""

    charged: bool
    code = None


@dataclass(frozen=True)
class Lost:
    """Another attempt has the job."""

    why: LifecycleError | None = None
    code = LOST


End = Succeeded | Failed | Cancelled | TimedOut | Postponed | Released | Died | Lost


def end_of(error: BaseException, reason: str | None) -> End:
    """Return the end that an attempt's error asks for. `reason` is the token's: why the attempt had to stop, if so."""
    if isinstance(error, CancelRequested):
        return Cancelled()
    if isinstance(error, LifecycleError):
        return Lost(error)
    if isinstance(error, ProvidersBusy):
        return Postponed(error)
    failure = as_job_error(error)
    if failure.code == reason == CANCELLED:
        return Cancelled()
    return Failed(failure, error)
