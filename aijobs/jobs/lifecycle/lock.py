"""Create jobs and lock them for attempts."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, FromClause, Select, and_, exists, func, null, update
from sqlalchemy.orm import Session

from aijobs.db.clock import read_clock
from aijobs.db.database import Base, Unit
from aijobs.db.statements import constant, insert_together, read_rows
from aijobs.jobs.conditions import DUE_AT, NO_SUSPECT
from aijobs.jobs.errors import JobLockConflict, RunsAlone
from aijobs.jobs.history import HistoryType, history_row, note_parameters
from aijobs.jobs.lease import Lease, Locked
from aijobs.jobs.lifecycle.changes import JobChanges
from aijobs.jobs.lifecycle.fairness import FairShare
from aijobs.jobs.lifecycle.statements import (
    FIND_HELD,
    FIRST_PROGRESS,
    OF_TOKEN,
    RUNNABLE,
    THE_JOB,
    locked_of,
    of,
    read_held,
    read_started,
)
from aijobs.jobs.lifecycle.transition import JOBS, Transition
from aijobs.jobs.models import AiJob, AiJobEvent
from aijobs.jobs.status import JobState
from aijobs.outbox.repository import asks_for

_NEXT_ATTEMPT = AiJob.attempt_no + 1
_NEW = {
    "lifecycle_status": JobState.QUEUED,
    "event_seq": 1,
    "attempt_no": 0,
    "progress": 0,
    "retry_count": 0,
    "lost_count": 0,
    "artifact_count": 0,
}
"""The state of a new job."""


class Locks(JobChanges):
    """The beginning of a job, and of each attempt."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._first_start = func.coalesce(AiJob.started_at, self._clock.now())
        self._fair_share = FairShare(self._clock)
        runnable = and_(DUE_AT <= self._clock.now(), RUNNABLE)
        self._lock = self._locking(self._read_with_share, runnable)
        self._lock_unhindered = self._locking(
            read_started,
            runnable,
            NO_SUSPECT,
            self._fair_share.holds_another(JOBS).is_(False),
            exists().where(asks_for(JOBS.c, _NEXT_ATTEMPT)).is_(True),
        )
        """For the common case, in one statement: no suspect, whose user holds no other job and need not wait for
        others, by the event that asks for this attempt.
        """

    def create_job(self, unit: Unit, columns: Mapping[str, Any], *also: tuple[type[Base], Mapping[str, Any]]) -> AiJob:
        """Insert a queued job with its first history row, and `also` other rows, in the caller's transaction.

        `columns`: of the job, without those of its state. `created_at` is now, unless it is given.
        """
        job = {"created_at": self._now(unit), "uncharged_losses": 0, **columns, **_NEW}
        trigger = job["trigger_type"]
        history = {
            "job_id": job["id"],
            "seq": job["event_seq"],
            "type": HistoryType.CREATED,
            "attempt_no": 0,
            "actor": f"user:{job['user_id']}" if trigger == "user" else trigger,
            "at": self._clock.now(),
        }
        created_at = insert_together(unit, (AiJob, job), (AiJobEvent, history), *also, returning="created_at")
        return AiJob(**{**job, "created_at": created_at})

    def _now(self, unit: Unit) -> datetime | ColumnElement[datetime]:
        return self._clock.now() if self._database.joins_statements else read_clock(unit, self._clock)

    def lock_job(
        self,
        job_id: str,
        instance_id: str,
        job_types: Collection[str] | None = None,
        *,
        event_id: str | None = None,
        suspects: bool = True,
    ) -> Locked:
        """Lock a due job for a new attempt; `JobLockConflict` if it can't be locked now.

        It must be due, held by nobody, not to be cancelled, and its queue not paused. `AnotherUserNext` if the user has
        a fair share of the queue already, and another user has a due job of `job_types` (None: any). A suspect is
        locked only if `suspects` is true (otherwise `RunsAlone`), whatever its user's share is: a process runs one at a
        time. `event_id`: the event that asks for this attempt, if the message names it.
        """
        token = f"{instance_id}/{secrets.token_hex(8)}"
        parameters = {
            **of(job_id),
            **note_parameters(HistoryType.LOCKED, instance=instance_id),
            "of_token": token,
            "of_event": event_id,
        }

        def lock_unhindered(unit: Unit) -> Locked | None:
            row = self._lock_unhindered.run(unit, parameters)
            return None if row is None else locked_of(row)

        def lock(unit: Unit) -> Locked:
            row = self._lock.run(unit, parameters)
            if row is None:
                raise JobLockConflict(job_id, "can't be locked: held, final, not due, or its queue is paused")
            locked, holds_another = locked_of(row[:-1]), row[-1]
            if not locked.job.is_suspect:
                self._fair_share.check(unit, locked.job, holds_another, job_types)
            elif not suspects:
                raise RunsAlone(job_id, locked.job.losses)
            return self._with_event(unit, locked)

        def confirm(session: Session) -> Locked | None:
            row = read_rows(session, FIND_HELD, parameters).one_or_none()
            return None if row is None else self._with_event(session, locked_of(row))

        if self._database.joins_statements and event_id is not None and not self._fair_share.has_deprioritised:
            locked = self._database.transact(lock_unhindered, confirm, alone=True)
            if locked is not None:
                return locked
        return self._database.transact(lock, confirm)

    def deprioritise(self, user_id: str, seconds: float) -> None:
        """For so long, have this process lock the user's jobs only if no other user has one that is due."""
        self._fair_share.deprioritise(user_id, seconds)

    def find_held(self, lease: Lease, event_id: str | None) -> Locked | None:
        """Return the job that is held under `lease`, as `lock_job` did; None if the lease is lost."""
        with self._database.read() as session:
            row = read_rows(session, FIND_HELD, {**of(lease), "of_event": event_id}).one_or_none()
        if row is None or row.attempt_no != lease.attempt_no:
            return None
        return replace(locked_of(row), event_id=event_id)

    def _with_event(self, unit: Unit, locked: Locked) -> Locked:
        """Find the event that asked for the attempt, unless the message named it, and mark it published."""
        if locked.event_id is not None:
            return locked
        job = locked.job
        return replace(
            locked, event_id=self._outbox.mark_asking_published(unit, job, job.attempt_no, self._clock.now())
        )

    def _read_with_share(self, source: FromClause) -> Select[Any]:
        return read_held(source).add_columns(self._fair_share.holds_another(source))

    def _locking(self, read: Callable[[FromClause], Select[Any]], *where: ColumnElement[bool]) -> Transition:
        change = update(JOBS).where(THE_JOB, *where).values(event_seq=AiJob.event_seq + 1, **self._locked(OF_TOKEN))
        return Transition(
            change,
            inserts=((AiJobEvent, None, lambda job: history_row(job, self._clock)),),
            read=read,
            update=self._outbox.mark_seen,
        )

    def _locked(self, token: str | ColumnElement[str]) -> dict[str, Any]:
        """Return the columns of a job that `token` locks."""
        return {
            "lifecycle_status": constant(JobState.RUNNING),
            "locked_by": token,
            "locked_at": self._clock.now(),
            "lock_until": self._clock.now(self._policy.length),
            "attempt_no": _NEXT_ATTEMPT,
            "next_attempt_at": null(),
            "progress": FIRST_PROGRESS,
            "started_at": self._first_start,
        }
