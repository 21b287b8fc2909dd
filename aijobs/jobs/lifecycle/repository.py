"""The only writer of `lifecycle_status`. Every change is one compare-and-set with its history row beside it.

A holder's write names the state, the token and the attempt. Freeing a job clears `locked_by`, so the old holder can
write nothing from that statement on.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from aijobs.jobs.conditions import NO_CANCEL, WAITS
from aijobs.jobs.errors import JobLockConflict
from aijobs.jobs.history import DISPATCHER, HistoryType, record
from aijobs.jobs.lease import JobErrorInfo, Lease, lease_of
from aijobs.jobs.lifecycle.confirm import ended
from aijobs.jobs.lifecycle.lock import Locks
from aijobs.jobs.lifecycle.release import Releases
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import JobState


class LifecycleRepository(Locks, Releases):
    """Creates, locks and ends jobs. `lock` begins attempts, `lease` serves them, `end` and `release` end them.

    `create_job` joins its caller's transaction. The `mark_` methods, `save_output`, `release_for_retry`, `expire` and
    `give_up` join the session they are given, and commit their own without one. The others commit at once.

    If an UPDATE finds no row, the method reads the job and raises `LockLost` (another attempt holds it),
    `JobLockConflict` or `IllegalTransition` (wrong state), `CancelRequested` or `JobGone`; nothing is written.
    """

    def give_up(
        self,
        job_id: str,
        attempt: int,
        error: JobErrorInfo,
        session: Session | None = None,
        *,
        actor: str = DISPATCHER,
        instance_id: str | None = None,
    ) -> AiJob:
        """Fail a job that waits for `attempt`, which nobody can run; `JobLockConflict` if it doesn't wait for it.

        It is locked as that attempt and failed, even if it isn't due or its queue is paused. The history has both, with
        the process that did it (`instance_id`, otherwise the actor's name).
        """
        instance = instance_id or actor
        token = f"{instance}/{secrets.token_hex(8)}"

        def end(session: Session) -> AiJob:
            waits_for_it = and_(WAITS, AiJob.attempt_no == attempt - 1, NO_CANCEL)
            if not self._change(session, job_id, waits_for_it, **self._locked(token)):
                raise JobLockConflict(job_id, f"doesn't wait for attempt {attempt}")
            job = self._get(session, job_id)
            record(session, self._clock, job, HistoryType.LOCKED, actor=actor, instance=instance)
            return self.mark_failed(lease_of(job), error, session, actor=actor)

        return self._in(session, end, ended(Lease(job_id, token, attempt)))

    def find(self, job_id: str) -> AiJob | None:
        """Return the job as it is now."""
        with self._database.read() as session:
            return session.get(AiJob, job_id)

    def find_by_lifecycle_status(
        self, statuses: Sequence[str], queue_name: str | None = None, limit: int | None = None
    ) -> list[AiJob]:
        """Return the jobs in these states, oldest first."""
        query = select(AiJob).where(AiJob.lifecycle_status.in_(statuses)).order_by(AiJob.created_at, AiJob.id)
        if queue_name is not None:
            query = query.where(AiJob.queue_name == queue_name)
        with self._database.read() as session:
            return list(session.execute(query.limit(limit)).scalars())

    def find_expired_locks(
        self, threshold_ms: int | None = None, limit: int = 100, after: tuple[datetime, str] | None = None
    ) -> list[AiJob]:
        """Return held jobs whose lease was last renewed over `threshold_ms` ago (lease and grace), the oldest first.

        `after` is (`lock_until`, id) of the last job of the page before.
        """
        threshold = timedelta(milliseconds=self._policy.threshold_ms if threshold_ms is None else threshold_ms)
        query = select(AiJob).where(
            AiJob.lifecycle_status == JobState.RUNNING,
            AiJob.locked_by.is_not(None),
            AiJob.lock_until <= self._clock.now(self._policy.length - threshold),
        )
        if after is not None:
            until, job_id = after
            # The first part alone is a range of the index.
            query = query.where(AiJob.lock_until >= until, or_(AiJob.lock_until > until, AiJob.id > job_id))
        with self._database.read() as session:
            return list(session.execute(query.order_by(AiJob.lock_until, AiJob.id).limit(limit)).scalars())
