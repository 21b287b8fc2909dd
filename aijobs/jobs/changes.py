"""The compare-and-set on a job's row, and what goes with it: history row, end event, and why it was refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, func, or_, select
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import after_commit
from aijobs.db.statements import change_by
from aijobs.errors import (
    CancelRequested,
    IllegalTransition,
    JobGone,
    JobLockConflict,
    LifecycleError,
    LockLost,
)
from aijobs.events import EventBus
from aijobs.jobs.claim import Claim, KnownJob
from aijobs.jobs.ends import announce_end
from aijobs.jobs.history import WORKER, record
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import CANCELLED, FINAL, QUEUED, RUNNING
from aijobs.outbox.repository import OutboxRepository


@dataclass(frozen=True)
class Note:
    """What the history row of a change says beside the job itself."""

    type: str
    actor: str = WORKER
    error_code: str | None = None
    duration_ms: int | None = None


WAITS: ColumnElement[bool] = or_(
    AiJob.lifecycle_status == QUEUED, and_(AiJob.lifecycle_status == RUNNING, AiJob.locked_by.is_(None))
)
"""Nobody holds the job, and it is not final."""
DUE_AT = func.coalesce(AiJob.next_attempt_at, AiJob.created_at)
"""The due time of a job that waits."""
NOT_ASKED = AiJob.cancel_requested_at.is_(None)
"""Nobody asked to cancel it."""

NO_SUSPECT = AiJob.lost_count + AiJob.uncharged_losses == 0
"""No worker was lost with it."""


THE_JOB = AiJob.id == bindparam("of_job")
"""The one job that the parameters `of` name."""
HELD = and_(
    THE_JOB,
    AiJob.lifecycle_status == RUNNING,
    AiJob.locked_by == bindparam("of_token"),
    AiJob.attempt_no == bindparam("of_attempt"),
)
"""It is held under the claim that they name."""
_ONE_MORE = AiJob.event_seq + 1
_JOB = select(AiJob).where(THE_JOB).execution_options(populate_existing=True)


def of(who: str | Claim) -> dict[str, Any]:
    """The parameters that say which job, and under which claim."""
    if isinstance(who, Claim):
        return {"of_job": who.job_id, "of_token": who.token, "of_attempt": who.attempt_no}
    return {"of_job": who}


class JobChanges:
    """Guarded changes of jobs in the session they are given. `LifecycleRepository` alone decides which."""

    def __init__(self, clock: Clock, outbox: OutboxRepository, bus: EventBus) -> None:
        self._clock, self._outbox, self._bus = clock, outbox, bus

    def get(self, session: Session, job_id: str) -> AiJob:
        job = self._find(session, job_id)
        if job is None:
            raise JobGone(job_id, "there is no such job")
        return job

    def _find(self, session: Session, job_id: str) -> AiJob | None:
        return session.execute(_JOB, of(job_id)).scalar()

    def set(self, session: Session, who: str | Claim, *where: ColumnElement[bool], **values: Any) -> bool:
        """One compare-and-set of a job by its id, or of the one that is held under a claim."""
        mine = HELD if isinstance(who, Claim) else THE_JOB
        return change_by(session, AiJob, mine, *where, of=of(who), **values) == 1

    def change(self, session: Session, who: str | Claim, *where: ColumnElement[bool], **values: Any) -> bool:
        """One compare-and-set that the history will tell: `event_seq` numbers its row."""
        return self.set(session, who, *where, event_seq=_ONE_MORE, **values)

    def held_change(
        self, session: Session, claim: Claim, note: Note, *where: ColumnElement[bool], **values: Any
    ) -> AiJob:
        """A holder's change with its history row, and its end event where it ends the job."""
        if not self.change(session, claim, *where, **values):
            raise self.refusal(session, claim)
        job = self.get(session, claim.job_id)
        self.tell(session, job, note, claim)
        return job

    def tell(self, session: Session, job: KnownJob, note: Note, claim: Claim | None = None) -> None:
        """What goes with a change that made `job` what it is: the history row, and if it is final the end event, and
        its announcement after the commit. `claim` is the holder's, if a holder made the change.
        """
        if job.lifecycle_status in FINAL:
            self._outbox.add_end(session, job)
            event_id = claim.event_id if claim else None
            announce = partial(announce_end, self._bus, job, event_id=event_id, duration_ms=note.duration_ms)
            after_commit(session, announce)
        record(
            session,
            self._clock,
            job,
            note.type,
            actor=note.actor,
            instance=claim.instance if claim else None,
            error_code=note.error_code,
            duration_ms=note.duration_ms,
        )

    def refusal(self, session: Session, who: str | Claim, *, cancelling: bool = False) -> LifecycleError:
        """Why an UPDATE found no row, read from the row as it is now; `cancelling`: it looked for a request."""
        job_id = who.job_id if isinstance(who, Claim) else who
        job = self._find(session, job_id)
        if job is None:
            return JobGone(job_id, "there is no such job")
        if job.lifecycle_status in FINAL and not (isinstance(who, Claim) and job.attempt_no != who.attempt_no):
            return IllegalTransition(job_id, f"is {job.lifecycle_status}, which is final")
        if isinstance(who, Claim):
            if job.locked_by != who.token or job.attempt_no != who.attempt_no:
                return LockLost(job_id, f"attempt {who.attempt_no} does not hold it any more")
            asked = job.cancel_requested_at is not None
            if cancelling and not asked:
                return IllegalTransition(job_id, "nobody asked to cancel it")
            if asked and not cancelling:
                return CancelRequested(job_id, "a cancel was asked for")
            return LockLost(job_id, "its lease was renewed or taken meanwhile")
        if job.lifecycle_status == QUEUED or job.locked_by is None:
            return IllegalTransition(job_id, f"is {job.lifecycle_status} and nobody asked to cancel it")
        return JobLockConflict(job_id, "a worker holds it")


def ended(claim: Claim, *states: str) -> Callable[[Session], AiJob | None]:
    """After a COMMIT whose answer was lost: the job, where this attempt ended it, in one of `states` (any)."""

    def read(session: Session) -> AiJob | None:
        job = session.get(AiJob, claim.job_id)
        return job if job and job.lifecycle_status in (states or FINAL) and job.attempt_no == claim.attempt_no else None

    return read


def saved(claim: Claim, output_hash: str) -> Callable[[Session], AiJob | None]:
    """After a COMMIT whose answer was lost: the job, where it holds the output and this attempt holds it."""

    def read(session: Session) -> AiJob | None:
        job = session.get(AiJob, claim.job_id)
        return job if job and job.locked_by == claim.token and job.output_hash == output_hash else None

    return read


def cancelled(job_id: str) -> Callable[[Session], AiJob | None]:
    """After a COMMIT whose answer was lost: the job, where it is cancelled."""

    def read(session: Session) -> AiJob | None:
        job = session.get(AiJob, job_id)
        return job if job and job.lifecycle_status == CANCELLED else None

    return read


def freed(claim: Claim) -> Callable[[Session], AiJob | None]:
    """After a COMMIT whose answer was lost: the job, where the claim holds it no more."""

    def read(session: Session) -> AiJob | None:
        job = session.get(AiJob, claim.job_id)
        return job if job and job.locked_by != claim.token else None

    return read
