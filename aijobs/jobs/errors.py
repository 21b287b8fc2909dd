"""Errors of the lifecycle: why a job's row refuses a change."""

from __future__ import annotations

from aijobs.errors import AijobsError


class LifecycleError(AijobsError):
    """A job's row refused a change. Nothing was written."""

    def __init__(self, job_id: str, why: str) -> None:
        super().__init__(f"job {job_id}: {why}")


class JobLockConflict(LifecycleError):
    """The job can't be locked or changed now: another worker holds it, it isn't due, or its queue is paused."""


class AnotherUserNext(JobLockConflict):
    """The job's user has a fair share of the queue, and another user's job, `instead`, is next."""

    def __init__(self, job_id: str, instead: str) -> None:
        super().__init__(job_id, "its user has a fair share of the queue already, and another user waits")
        self.instead = instead


class RunsAlone(LifecycleError):
    """The job is a suspect, which runs only in a process of its own."""

    def __init__(self, job_id: str, losses: int) -> None:
        super().__init__(job_id, "it has lost a worker, so it runs only in a process of its own")
        self.losses = losses


class LockLost(LifecycleError):
    """Another attempt holds the job. The caller must stop and write nothing."""


class IllegalTransition(LifecycleError):
    """The job's state does not allow this change."""


class CancelRequested(LifecycleError):
    """A cancel was requested: the job can only end `cancelled`."""


class JobGone(LifecycleError):
    """There is no such job."""
