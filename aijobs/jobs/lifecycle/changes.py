"""One change of a job: the compare-and-set, its history row, its end event, and why it was refused.

Every change of a job's state goes through here, so it is also where a change could become a single statement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Database, T, Unit, after_commit
from aijobs.db.statements import change_by, read_rows
from aijobs.events import EventBus
from aijobs.jobs.ends import announce_end
from aijobs.jobs.errors import CancelRequested, IllegalTransition, JobGone, JobLockConflict, LifecycleError, LockLost
from aijobs.jobs.history import WORKER, HistoryType, record
from aijobs.jobs.lease import KnownJob, Lease, LeasePolicy
from aijobs.jobs.lifecycle.statements import HELD, THE_JOB, of
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import END_EVENTS, FINAL, JobState
from aijobs.outbox.repository import OutboxRepository

_ONE_MORE = AiJob.event_seq + 1
_STATE = select(AiJob.lifecycle_status, AiJob.attempt_no, AiJob.locked_by, AiJob.cancel_requested_at).where(THE_JOB)
_JOB = select(AiJob).where(THE_JOB).execution_options(populate_existing=True)


@dataclass(frozen=True)
class Note:
    """What the history row of a change says beside the job itself."""

    type: HistoryType
    actor: str = WORKER
    error_code: str | None = None
    duration_ms: int | None = None


class JobChanges:
    """The part that locking, renewing, ending and releasing share. Each method joins the session it is given."""

    def __init__(
        self, database: Database, clock: Clock, outbox: OutboxRepository, policy: LeasePolicy, bus: EventBus
    ) -> None:
        self._database, self._clock, self._outbox, self._policy, self._bus = database, clock, outbox, policy, bus

    def _in(
        self,
        session: Session | None,
        work: Callable[[Session], T],
        confirm: Callable[[Session], T | None] | None = None,
    ) -> T:
        """Run `work` in the caller's session, or in a transaction of its own."""
        return self._database.write(work, confirm) if session is None else work(session)

    def _get(self, session: Session, job_id: str) -> AiJob:
        job = self._find(session, job_id)
        if job is None:
            raise JobGone(job_id, "there is no such job")
        return job

    def _find(self, session: Session, job_id: str) -> AiJob | None:
        return session.execute(_JOB, of(job_id)).scalar()

    def _set(self, session: Session, target: str | Lease, *where: ColumnElement[bool], **values: Any) -> bool:
        """Update a job by its id, or the one that is held under a lease. Return whether it was found."""
        found = HELD if isinstance(target, Lease) else THE_JOB
        return change_by(session, AiJob, found, *where, of=of(target), **values) == 1

    def _change(self, session: Session, target: str | Lease, *where: ColumnElement[bool], **values: Any) -> bool:
        """Update a job and number the history row that the caller adds."""
        return self._set(session, target, *where, event_seq=_ONE_MORE, **values)

    def _change_held(
        self, session: Session, lease: Lease, note: Note, *where: ColumnElement[bool], **values: Any
    ) -> AiJob:
        """Update a held job, with its history row, and its end event if it ends."""
        if not self._change(session, lease, *where, **values):
            raise self._refusal(session, lease)
        job = self._get(session, lease.job_id)
        self._record(session, job, note, lease)
        return job

    def _record(self, session: Session, job: AiJob, note: Note, lease: Lease | None = None) -> None:
        """Add a change's history row. If `job` is final now, add its end event and announce it after the commit."""
        if job.lifecycle_status in FINAL:
            self._outbox.add_end(session, job, END_EVENTS[job.lifecycle_status])
            self._announce(session, job, lease, note.duration_ms)
        record(
            session,
            self._clock,
            job,
            note.type,
            actor=note.actor,
            instance=lease.instance if lease else None,
            error_code=note.error_code,
            duration_ms=note.duration_ms,
        )

    def _announce(self, unit: Unit, job: KnownJob, lease: Lease | None, duration_ms: int | None) -> None:
        event_id = lease.event_id if lease else None
        after_commit(unit, partial(announce_end, self._bus, job, event_id=event_id, duration_ms=duration_ms))

    def _refusal(self, unit: Unit, target: str | Lease, *, cancelling: bool = False) -> LifecycleError:
        """Return why an UPDATE found no row. `cancelling`: it required a cancel request."""
        job_id = target.job_id if isinstance(target, Lease) else target
        job = read_rows(unit, _STATE, of(job_id)).one_or_none()
        if job is None:
            return JobGone(job_id, "there is no such job")
        if job.lifecycle_status in FINAL and not (isinstance(target, Lease) and job.attempt_no != target.attempt_no):
            return IllegalTransition(job_id, f"is {job.lifecycle_status}, which is final")
        if isinstance(target, Lease):
            if job.locked_by != target.token or job.attempt_no != target.attempt_no:
                return LockLost(job_id, f"attempt {target.attempt_no} no longer holds it")
            requested = job.cancel_requested_at is not None
            if cancelling and not requested:
                return IllegalTransition(job_id, "no cancel was requested")
            if requested and not cancelling:
                return CancelRequested(job_id, "a cancel was requested")
            return LockLost(job_id, "its lease was renewed or taken in between")
        if job.lifecycle_status == JobState.QUEUED or job.locked_by is None:
            return IllegalTransition(job_id, f"is {job.lifecycle_status} and no cancel was requested")
        return JobLockConflict(job_id, "a worker holds it")
