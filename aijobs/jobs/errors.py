"""Why a job's row refuses a change."""

from __future__ import annotations

from aijobs.errors import AijobsError


class LifecycleError(AijobsError):
    """A change of a job that its row refused; nothing was written."""

    def __init__(self, job_id: str, why: str) -> None:
        super().__init__(f"job {job_id}: {why}")
        self.job_id = job_id


class JobLockConflict(LifecycleError):
    """The job can't be locked or changed now: another holds it, it isn't due, or its queue is paused."""


class NotYourTurn(JobLockConflict):
    """The job's user holds his share of the queue while another waits, whose best job is `instead`."""

    def __init__(self, job_id: str, instead: str) -> None:
        super().__init__(job_id, "its user holds a share of the queue already, and another waits")
        self.instead = instead


class RunsAlone(LifecycleError):
    """The job is a suspect, and the asker's process is shared: it has to be run in a process of its own."""

    def __init__(self, job_id: str, losses: int) -> None:
        super().__init__(job_id, "a worker was lost over it, and it runs in a process of its own")
        self.losses = losses


class LockLost(LifecycleError):
    """Another attempt or holder has the job; whoever got this must stop and write nothing."""


class IllegalTransition(LifecycleError):
    """The job's state does not allow this change."""


class CancelRequested(LifecycleError):
    """A cancel was asked for: the job goes on in no way but to `cancelled`."""


class JobGone(LifecycleError):
    """There is no such job."""
