"""Free a job without ending it: released, scheduled for a retry, or taken from a worker that was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from aijobs.definitions.definition import MOST_LOSSES, QUEUES
from aijobs.jobs.conditions import FREED
from aijobs.jobs.errors import CancelRequested, LockLost
from aijobs.jobs.history import REAPER, WORKER, HistoryType
from aijobs.jobs.lease import JobErrorInfo, Lease
from aijobs.jobs.lifecycle.changes import Note
from aijobs.jobs.lifecycle.confirm import freed
from aijobs.jobs.lifecycle.end import Ends
from aijobs.jobs.lifecycle.statements import FREE
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import FINAL

WORKER_LOST = "INTERNAL_WORKER_LOST"
_CHARGED = {"lost_count": AiJob.lost_count + 1}
_UNCHARGED = {"uncharged_losses": AiJob.uncharged_losses + 1}


class Releases(Ends):
    """The ways in which an attempt gives its job to the next one."""

    def release(self, lease: Lease, *, wait: timedelta | None = None, error_code: str | None = None) -> AiJob:
        """Release the lease; the attempt doesn't count, and another worker may lock the job at once.

        With `wait` the job is `postponed` for so long, because its providers are unavailable; `error_code` says why.
        """

        def free(session: Session) -> AiJob:
            note = Note(HistoryType.RELEASED if wait is None else HistoryType.POSTPONED, error_code=error_code)
            due = self._clock.now(wait or timedelta())
            job = self._go_on_or_cancel(session, lease, note, next_attempt_at=due, **FREE)
            return self._ask_again(session, job)

        return self._database.write(free, freed(lease))

    def release_for_retry(
        self,
        lease: Lease,
        at: datetime,
        *,
        error_code: str | None = None,
        duration_ms: int | None = None,
        faults: Sequence[str] = (),
        session: Session | None = None,
    ) -> AiJob:
        """Schedule the next attempt for `at`, after an error. The outbox waits, and no worker.

        `faults`: what was wrong with the answer, for the next attempt's prompt.
        """
        note = Note(HistoryType.RETRY_SCHEDULED, error_code=error_code, duration_ms=duration_ms)

        def free(session: Session) -> AiJob:
            plan = {"next_attempt_at": at, "retry_count": AiJob.retry_count + 1, "answer_faults": list(faults) or None}
            job = self._go_on_or_cancel(session, lease, note, **plan, **FREE)
            return self._ask_again(session, job)

        return self._in(session, free, freed(lease))

    def expire(
        self, lease: Lease, lock_until: datetime, session: Session | None = None, *, at_once: bool = False
    ) -> AiJob:
        """Take the lease of a lost worker, uncharged: another job of its process may have ended it.

        `lock_until` is what was read: `LockLost` if the lease was renewed since. The next attempt waits for the backoff
        of the queue · 2^(losses − 1); with `at_once` (the worker is known to be gone) it doesn't. A row that another
        transaction has locked is refused (`JobLockConflict`): its holder is late, and must not delay other jobs. With
        `at_once` and without a caller's session the row is waited for: the server may not know yet that the worker is
        gone.
        """
        waits = at_once and session is None

        def take(session: Session) -> AiJob:
            nonlocal waits
            if self._lock_until(session, lease, waits) != lock_until:
                refused = self._refusal(session, lease)
                # A cancel is the holder's to write, and the holder is alive.
                renewed = LockLost(lease.job_id, "its lease was renewed or taken in between")
                raise renewed if isinstance(refused, CancelRequested) else refused
            waits = True  # On a repeat the row may be locked by our own COMMIT, whose answer is late.
            return self._lose(session, lease, Note(HistoryType.LEASE_LOST, REAPER), _UNCHARGED, at_once=at_once)

        return self._in(session, take, freed(lease))

    def charge(self, lease: Lease) -> AiJob:
        """Free a job whose own process died, charged: no other job had run in it."""
        note = Note(HistoryType.LEASE_LOST, WORKER, WORKER_LOST)
        return self._database.write(lambda session: self._lose(session, lease, note, _CHARGED), freed(lease))

    def lose_uncharged(self, lease: Lease) -> AiJob:
        """Free a job whose own process died, uncharged: another job had run in it before."""
        note = Note(HistoryType.LEASE_LOST, WORKER)
        return self._database.write(lambda session: self._lose(session, lease, note, _UNCHARGED), freed(lease))

    def _lose(
        self, session: Session, lease: Lease, note: Note, count: Mapping[str, Any], *, at_once: bool = False
    ) -> AiJob:
        """Free a job and count the loss. Ask for the next attempt, or fail the job."""
        job = self._go_on_or_cancel(session, lease, note, **count, **FREE)
        if job.lifecycle_status in FINAL:
            return job
        policy = QUEUES[job.queue_name]
        if job.losses >= MOST_LOSSES or job.lost_count >= policy.attempts + (1 if job.output_hash else 0):
            return self._fail_lost(session, job, note.actor, lease)
        wait = timedelta(milliseconds=0 if at_once else policy.backoff_ms * 2 ** (job.losses - 1))
        self._set(session, job.id, next_attempt_at=self._clock.now(wait))
        return self._ask_again(session, self._get(session, job.id))

    def _fail_lost(self, session: Session, job: AiJob, actor: str, lease: Lease) -> AiJob:
        """Fail a job that was freed in this transaction: it may lose no more workers."""
        why = f"its own process died {job.lost_count} times, shared ones {job.uncharged_losses} times"
        if not self._change(session, job.id, FREED, **self._failed(JobErrorInfo.of(WORKER_LOST, why))):
            raise self._refusal(session, job.id)
        failed = self._get(session, job.id)
        self._record(session, failed, Note(HistoryType.FAILED, actor, WORKER_LOST), lease)
        return failed

    def _ask_again(self, session: Session, job: AiJob) -> AiJob:
        """Write the event for the job's next attempt, unless it has ended."""
        if job.lifecycle_status not in FINAL:
            self._outbox.ask(session, job, job.next_attempt_at)
        return job
