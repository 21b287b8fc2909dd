"""Create jobs and lock them for attempts."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

from sqlalchemy import Result, and_, func
from sqlalchemy.orm import Session

from aijobs.jobs.conditions import DUE_AT
from aijobs.jobs.errors import JobLockConflict, RunsAlone
from aijobs.jobs.history import SYSTEM, record
from aijobs.jobs.lease import Lease, Locked
from aijobs.jobs.lifecycle.changes import JobChanges
from aijobs.jobs.lifecycle.fairness import FairShare
from aijobs.jobs.lifecycle.statements import FIRST_PROGRESS, HELD_JOB, RUNNABLE, locked_job, of
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import QUEUED, RUNNING
from aijobs.outbox.repository import SeenEvent

_NEXT_ATTEMPT = AiJob.attempt_no + 1


class Locks(JobChanges):
    """The beginning of a job, and of each attempt."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._runnable = and_(DUE_AT <= self._clock.now(), RUNNABLE)
        self._first_start = func.coalesce(AiJob.started_at, self._clock.now())
        self._fair_share = FairShare(self._clock)
        self._locked_job = locked_job(self._fair_share.holders)

    def create_job(self, session: Session, job: AiJob) -> AiJob:
        """Insert `job` as queued, with its first history row, in the caller's transaction.

        The caller adds snapshot and enqueue event to the same transaction.
        """
        job.lifecycle_status = QUEUED
        job.event_seq, job.attempt_no, job.progress = 1, 0, 0
        session.add(job)
        session.flush()
        actor = SYSTEM if job.trigger_type == "system" else f"{job.trigger_type}:{job.user_id}"
        record(session, self._clock, job, "created", actor=actor if job.trigger_type == "user" else job.trigger_type)
        return job

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

        In one statement: due, held by nobody, no cancel requested, and its queue not paused. `NotYourTurn` if its user
        has a fair share of the queue already, and another user has a due job of `job_types` (any). A suspect is locked
        only if `suspects` is true (`RunsAlone` otherwise), and whatever its user's share is: a process runs one at a
        time. `event_id`: the event that asks for this attempt, if the message names it; with it one statement finds
        everything.
        """
        token = f"{instance_id}/{secrets.token_hex(8)}"

        def find(session: Session) -> Result[*tuple[Any, ...]]:
            return session.execute(self._locked_job, {**of(job_id), "of_token": token, "of_event": event_id})

        def lock(session: Session) -> Locked:
            if not self._change(session, job_id, self._runnable, **self._locked(token)):
                raise JobLockConflict(job_id, "can't be locked: held, final, not due, or its queue is paused")
            job, held, content, *row = find(session).one()
            if not job.is_suspect:
                self._fair_share.check(session, job, held, job_types)
            elif not suspects:
                raise RunsAlone(job_id, job.losses)
            event = SeenEvent(*row)
            event_id = self._outbox.mark_asking_published(session, job, job.attempt_no, job.locked_at, event)
            record(session, self._clock, job, "locked", instance=instance_id)
            return Locked(job, event_id, content)

        def confirm(session: Session) -> Locked | None:
            found = find(session).one_or_none()
            if found is None:
                return None
            job, _, content, *event = found
            asking = self._outbox.find_asking(session, job, job.attempt_no, SeenEvent(*event))
            return Locked(job, asking.id if asking else None, content)

        return self._database.write(lock, confirm)

    def put_behind(self, user_id: str, seconds: float) -> None:
        """For so long, have this process lock the user's jobs only if no other user has one that is due."""
        self._fair_share.put_behind(user_id, seconds)

    def find_held(self, lease: Lease, event_id: str | None) -> Locked | None:
        """Return the job that is held under `lease`, as `lock_job` did; None if the lease is lost."""
        with self._database.read() as session:
            found = session.execute(HELD_JOB, of(lease)).one_or_none()
            return Locked(found[0], event_id, found[1]) if found else None

    def _locked(self, token: str) -> dict[str, Any]:
        """Return the columns of a job that `token` locks."""
        return {
            "lifecycle_status": RUNNING,
            "locked_by": token,
            "locked_at": self._clock.now(),
            "lock_until": self._clock.now(self._policy.length),
            "attempt_no": _NEXT_ATTEMPT,
            "next_attempt_at": None,
            "progress": FIRST_PROGRESS,
            "started_at": self._first_start,
        }
