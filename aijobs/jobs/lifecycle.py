"""The only writer of `lifecycle_status`. Every change is one compare-and-set with its history row beside it.

A holder's write names the state, the token and the attempt; freeing a lock clears `locked_by`, so that from that
statement on the old holder can write nothing. A cancel that was requested wins over every way a job could go on: the
UPDATE that would let it go on looks for the request, and where it finds one the job ends `cancelled` instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Result,
    Select,
    Subquery,
    Text,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    null,
    or_,
    select,
)
from sqlalchemy.orm import Session

from aijobs.ai.billing.usage import mark_lost
from aijobs.canonical import canonical_hash
from aijobs.db.clock import Clock
from aijobs.db.database import TRIES, Database, T
from aijobs.db.statements import read_rows
from aijobs.definitions.definition import MOST_LOSSES, QUEUES
from aijobs.errors import CancelRequested, JobLockConflict, LockLost, RunsAlone
from aijobs.events import EventBus
from aijobs.jobs.changes import (
    DUE_AT,
    HELD,
    NOT_ASKED,
    THE_JOB,
    WAITS,
    JobChanges,
    Note,
    cancelled,
    ended,
    freed,
    of,
    saved,
)
from aijobs.jobs.claim import Claim, JobErrorInfo, KnownJob, Lease, Locked, LockedRow, claim_of
from aijobs.jobs.fairness import FairShare
from aijobs.jobs.history import DISPATCHER, REAPER, SYSTEM, WORKER, record
from aijobs.jobs.models import AiJob, AiJobSnapshot
from aijobs.jobs.status import CANCELLED, FAILED, FINAL, OPEN, QUEUED, RUNNING, SUCCEEDED
from aijobs.outbox.models import OutboxEvent, QueuePause
from aijobs.outbox.repository import SEEN_EVENT, OutboxRepository, SeenEvent

__all__ = ["DUE_AT", "Claim", "JobErrorInfo", "Lease", "LifecycleRepository", "Locked", "claim_of"]

WORKER_LOST = "INTERNAL_WORKER_LOST"
ASKED, SAVED = 10, 90
"""The progress of an attempt whose request leaves for a provider, and of one whose answer is saved."""


_TO_BE_RUN = and_(WAITS, NOT_ASKED, ~exists().where(QueuePause.queue_name == AiJob.queue_name))
"""A job that a worker may lock, once it is due."""
_ROW = select(*(getattr(AiJob, part.name) for part in fields(LockedRow))).where(HELD, NOT_ASKED).with_for_update()
_LEASE = select(AiJob.lock_until).where(THE_JOB).with_for_update(key_share=True)
_LEASE_AT_HAND = select(AiJob.lock_until).where(THE_JOB).with_for_update(key_share=True, skip_locked=True)
_ASKED = ~NOT_ASKED
_NEXT_ATTEMPT = AiJob.attempt_no + 1
_CHARGED = {"lost_count": AiJob.lost_count + 1}
_UNCHARGED = {"uncharged_losses": AiJob.uncharged_losses + 1}
_FIRST_PROGRESS = case((AiJob.output_hash.is_not(None), SAVED), else_=0)
_FREE = {"locked_by": null(), "locked_at": null(), "lock_until": null()}


def _locked_query(holders: Subquery) -> Select[*tuple[Any, ...]]:
    """A job that was just locked, how many its user holds with it, its input where that is to be worked on, and the
    event that is said to ask for it."""
    with_it = and_(holders.c.queue_name == AiJob.queue_name, holders.c.holder == AiJob.user_id)
    return (
        select(AiJob, holders.c.number, cast(AiJobSnapshot.content, Text), *SEEN_EVENT)
        .join(holders, with_it)
        .outerjoin(AiJobSnapshot, and_(AiJobSnapshot.job_id == AiJob.id, AiJob.output_hash.is_(None)))
        .outerjoin(OutboxEvent, and_(OutboxEvent.id == bindparam("of_event"), OutboxEvent.aggregate_id == AiJob.id))
        .where(THE_JOB, AiJob.locked_by == bindparam("of_token"))
        .execution_options(populate_existing=True)
    )


@lru_cache  # The same expression for the same percentage, so that its statement is the same.
def _raised(percent: int) -> ColumnElement[int]:
    return case((AiJob.progress < percent, percent), else_=AiJob.progress)


class LifecycleRepository:
    """Creates, locks and ends jobs.

    `create_job` joins its caller's transaction. `lock_job`, `extend_lock`, `release`, `release_for_retry`,
    `report_progress`, `request_cancel`, `expire`, `charge` and `lose_uncharged` commit at once. The `mark_` methods,
    `save_output` and `give_up` join the session they are given; without one they commit their own.

    A method whose UPDATE finds no row reads the job and raises `LockLost` (another attempt or holder),
    `JobLockConflict` or `IllegalTransition` (wrong state), `CancelRequested` or `JobGone`; nothing is written.

    Each end of a job, by whichever method, is announced once the transaction is committed (`announce_end`).
    """

    def __init__(self, database: Database, clock: Clock, outbox: OutboxRepository, lease: Lease, bus: EventBus) -> None:
        self._database, self._clock, self._outbox, self._lease = database, clock, outbox, lease
        self._changes = JobChanges(clock, outbox, bus)
        self._may_run = and_(DUE_AT <= clock.now(), _TO_BE_RUN)
        self._first_start = func.coalesce(AiJob.started_at, clock.now())
        self._fair_share = FairShare(clock)
        self._locked_job = _locked_query(self._fair_share.holders)

    # --- creating and locking ----------------------------------------------------------------------------------

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
        """Take a due job for a new attempt; `JobLockConflict` where it can't be taken now.

        Due, held by nobody, not asked to cancel, and of a queue that isn't paused: in one statement. `NotYourTurn`
        where its user has a share of the queue already, and another waits for work of `job_types` (of any).
        `event_id` is the event that asks for this attempt as far as is known: with it, one statement finds all.
        Without `suspects` a job that lost a worker is refused (`RunsAlone`).
        """
        token = f"{instance_id}/{secrets.token_hex(8)}"

        def find(session: Session) -> Result[*tuple[Any, ...]]:
            return session.execute(self._locked_job, {**of(job_id), "of_token": token, "of_event": event_id})

        def lock(session: Session) -> Locked:
            if not self._changes.change(session, job_id, self._may_run, **self._locked(token)):
                raise JobLockConflict(job_id, "not there to be locked: held, final, not due, or its queue is paused")
            job, held, content, *event = find(session).one()
            if job.is_suspect and not suspects:
                raise RunsAlone(job_id, job.losses)
            self._fair_share.check(session, job, held, job_types)
            settled = self._outbox.settle_enqueue(session, job, job.attempt_no, job.locked_at, SeenEvent(*event))
            record(session, self._clock, job, "locked", instance=instance_id)
            return Locked(job, settled, content)

        def ours(session: Session) -> Locked | None:
            found = find(session).one_or_none()
            if found is None:
                return None
            job, _, content, *event = found
            asking = self._outbox.find_asking(session, job, job.attempt_no, SeenEvent(*event))
            return Locked(job, asking.id if asking else None, content)

        return self._database.write(lock, settle=ours)

    def put_behind(self, user_id: str, seconds: float) -> None:
        """For so long, have this process lock the user's jobs only if no other user has one that is due."""
        self._fair_share.put_behind(user_id, seconds)

    def _locked(self, token: str) -> dict[str, Any]:
        return {
            "lifecycle_status": RUNNING,
            "locked_by": token,
            "locked_at": self._clock.now(),
            "lock_until": self._clock.now(self._lease.length),
            "attempt_no": _NEXT_ATTEMPT,
            "next_attempt_at": None,
            "progress": _FIRST_PROGRESS,
            "started_at": self._first_start,
        }

    # --- while an attempt runs ---------------------------------------------------------------------------------

    def extend_lock(self, claim: Claim, *, tries: int = TRIES, waits: bool = True) -> None:
        """Renew the lease; a beat that comes late, but before anybody took over, renews it too.

        Unless it `waits`, a row that another transaction has just now is refused (`JobLockConflict`): while a suspect's
        child projects, nobody takes the lease.
        """
        values = {"lock_until": self._clock.now(self._lease.length)}
        self._database.write(lambda s: self._set_quietly(s, claim, values, waits), tries=tries)

    def report_progress(self, claim: Claim, percent: int, *, tries: int = TRIES) -> None:
        """Raise the progress to `percent` (0–100); within an attempt it never falls."""
        values = {"progress": _raised(max(0, min(100, percent)))}
        self._database.write(lambda s: self._set_quietly(s, claim, values), tries=tries)

    def _set_quietly(self, session: Session, claim: Claim, values: dict[str, Any], waits: bool = True) -> None:
        """A holder's write that is no change of state, and leaves no history."""
        if not waits:
            self._lock_lease(session, claim, waits)
        if not self._changes.set(session, claim, **values):
            raise self._changes.refusal(session, claim)

    def save_output(self, claim: Claim, output: Any, session: Session | None = None) -> AiJob:
        """Keep the validated output and its hash on the job, so that it is never bought again."""
        note, output_hash = Note("output_saved"), canonical_hash(output)
        values = {"validated_output": output, "output_hash": output_hash, "progress": _raised(SAVED)}
        # Not again: a repeat after a COMMIT that was only late would tell the history of it a second time.
        new = or_(AiJob.output_hash.is_(None), AiJob.output_hash != output_hash)
        return self._in(
            session, lambda s: self._changes.held_change(s, claim, note, new, **values), saved(claim, output_hash)
        )

    def note_provider_call(self, session: Session, claim: Claim) -> AiJob:
        """Record that the attempt is about to call a provider, in the transaction that opens the usage row.

        `CancelRequested` where a cancel was asked for: then no call is made.
        """
        note = Note("provider_called")
        return self._changes.held_change(session, claim, note, NOT_ASKED, progress=_raised(ASKED))

    def lock_row(self, session: Session, claim: Claim) -> LockedRow:
        """Lock the held job's row until the end of the transaction, for a projection, and read what that needs of it.

        `CancelRequested` where a cancel was asked for, `LockLost` where the claim is gone.
        """
        row = read_rows(session, _ROW, of(claim)).one_or_none()
        if row is None:
            raise self._changes.refusal(session, claim)
        return LockedRow(**row._asdict())

    # --- ending ------------------------------------------------------------------------------------------------

    def mark_succeeded(
        self,
        claim: Claim,
        session: Session | None = None,
        *,
        row: LockedRow | None = None,
        output: Any = None,
        artifact_count: int = 0,
        duration_ms: int | None = None,
    ) -> KnownJob:
        """End the job `succeeded`, with the number of artifacts its projection made.

        `output` is the validated output if it isn't saved yet: it and its hash are written with the success.
        Fenced by the claim, not by the clock: a late result is taken as long as nobody took over. `row` is what
        `lock_row` found under this claim in this transaction, where it was called: then nothing is read again.
        """
        if row is not None and (row.id, row.attempt_no) != (claim.job_id, claim.attempt_no):
            held = f"attempt {claim.attempt_no} of {claim.job_id}"
            raise ValueError(f"the row is of attempt {row.attempt_no} of job {row.id}, and the claim of {held}")

        def succeed(session: Session) -> KnownJob:
            was = row or self.lock_row(session, claim)
            values = self._final(SUCCEEDED, progress=100, artifact_count=artifact_count)
            if output is not None:
                was = replace(was, output_hash=canonical_hash(output))
                values.update(validated_output=output, output_hash=was.output_hash)
            if not self._changes.change(session, claim, NOT_ASKED, **values):
                raise self._changes.refusal(session, claim)
            job = replace(was, lifecycle_status=SUCCEEDED, event_seq=was.event_seq + 1)
            self._changes.tell(session, job, Note(SUCCEEDED, duration_ms=duration_ms), claim)
            return job

        return self._in(session, succeed, ended(claim, SUCCEEDED))

    def mark_failed(
        self,
        claim: Claim,
        error: JobErrorInfo,
        session: Session | None = None,
        *,
        actor: str = WORKER,
        duration_ms: int | None = None,
    ) -> AiJob:
        """End the job `failed` with this error; `cancelled` where a cancel was asked for."""

        note = Note(FAILED, actor, error.code, duration_ms)
        values = self._failed(error)
        return self._in(session, lambda s: self._go_on_or_cancel(s, claim, note, **values), ended(claim))

    def mark_cancelled(
        self, job: str | Claim, session: Session | None = None, *, duration_ms: int | None = None
    ) -> AiJob:
        """End a job whose cancel was requested: under the holder's claim, or by id where nobody holds it."""

        if isinstance(job, Claim):
            claim, note = job, Note(CANCELLED, WORKER, duration_ms=duration_ms)
            return self._in(session, lambda s: self._cancel(s, claim, note), ended(claim))
        job_id = job
        return self._in(session, lambda s: self._cancel(s, job_id, Note(CANCELLED, SYSTEM), WAITS), cancelled(job_id))

    def request_cancel(self, job_id: str, by: str) -> AiJob:
        """Record the wish to cancel, once; and end the job at once where no worker holds it.

        A final job is returned as it is. Whether the job's definition allows it is the caller's to know.
        """

        def request(session: Session) -> AiJob:
            asked = self._changes.change(
                session,
                job_id,
                and_(AiJob.lifecycle_status.in_(OPEN), AiJob.cancel_requested_at.is_(None)),
                cancel_requested_at=self._clock.now(),
                cancel_requested_by=by,
            )
            job = self._changes.get(session, job_id)
            if asked:
                record(session, self._clock, job, "cancel_requested", actor=by)
            if job.lifecycle_status in FINAL or job.locked_by is not None:
                return job
            self._outbox.settle_enqueue(session, job, job.attempt_no + 1, None)  # It was never sent.
            return self._cancel(session, job_id, Note(CANCELLED, by), WAITS)

        return self._database.write(request, settle=cancelled(job_id))

    # --- giving the lease away ---------------------------------------------------------------------------------

    def release(
        self, claim: Claim, *, actor: str = WORKER, wait: timedelta | None = None, error_code: str | None = None
    ) -> AiJob:
        """Give the lease back, uncounted: for a worker that stops, and another may take the job at once. With `wait`
        the job is `postponed` so long, as its providers are not to be asked now; `error_code` says what ails them.
        """

        def free(session: Session) -> AiJob:
            note = Note("released" if wait is None else "postponed", actor, error_code)
            due = self._clock.now(wait or timedelta())
            job = self._go_on_or_cancel(session, claim, note, next_attempt_at=due, **_FREE)
            return self._ask_again(session, job)

        return self._database.write(free, settle=freed(claim))

    def release_for_retry(
        self,
        claim: Claim,
        at: datetime,
        *,
        error_code: str | None = None,
        duration_ms: int | None = None,
        faults: Sequence[str] = (),
        session: Session | None = None,
    ) -> AiJob:
        """Give the lease away until `at` after an error: the wait is in the outbox and holds no worker.

        `faults` name what was wrong with the answer, for the next attempt's prompt.
        """

        note = Note("retry_scheduled", error_code=error_code, duration_ms=duration_ms)

        def free(session: Session) -> AiJob:
            plan = {"next_attempt_at": at, "retry_count": AiJob.retry_count + 1, "answer_faults": list(faults) or None}
            job = self._go_on_or_cancel(session, claim, note, **plan, **_FREE)
            return self._ask_again(session, job)

        return self._in(session, free, freed(claim))

    def expire(
        self, claim: Claim, lock_until: datetime, session: Session | None = None, *, at_once: bool = False
    ) -> AiJob:
        """Take a lost worker's lease away, uncharged: other jobs ran in its process, and any of them may have ended it.

        `lock_until` is what was read, so that a beat in between wins (`LockLost`). The takeover waits for the
        queue's backoff · 2^(losses − 1), or not at all with `at_once` (the worker is known to be gone, and the
        server may only learn of it). Else a row that another transaction has just now isn't waited for, but refused
        (`JobLockConflict`): a holder who is late, or stands still in the middle, keeps no other job waiting. In a
        caller's session, which has other jobs' rows, no row is ever waited for.
        """

        waits = at_once and session is None

        def take(session: Session) -> AiJob:
            nonlocal waits
            if self._lock_lease(session, claim, waits) != lock_until:
                refused = self._changes.refusal(session, claim)
                # A job that is to be cancelled is its holder's to end, who beats.
                renewed = LockLost(claim.job_id, "its lease was renewed or taken meanwhile")
                raise renewed if isinstance(refused, CancelRequested) else refused
            waits = True  # At a second try: it may be our own, whose COMMIT is only late.
            return self._lose(session, claim, Note("lease_lost", REAPER), _UNCHARGED, at_once)

        return self._in(session, take, freed(claim))

    def charge(self, claim: Claim) -> AiJob:
        """Give up the lease of a job whose own process died, charged: nothing else ran in it."""
        note = Note("lease_lost", WORKER, WORKER_LOST)
        return self._database.write(lambda s: self._lose(s, claim, note, _CHARGED, False), settle=freed(claim))

    def lose_uncharged(self, claim: Claim) -> AiJob:
        """Give up the lease of a job whose own process died, uncharged: another job ran in it before."""
        note = Note("lease_lost", WORKER)
        return self._database.write(lambda s: self._lose(s, claim, note, _UNCHARGED, False), settle=freed(claim))

    def _lose(self, session: Session, claim: Claim, note: Note, count: Mapping[str, Any], at_once: bool) -> AiJob:
        """Free a lease that was lost and count it: the next attempt is asked for, or the job fails."""
        job = self._go_on_or_cancel(session, claim, note, **count, **_FREE)
        if job.lifecycle_status in FINAL:
            return job
        policy = QUEUES[job.queue_name]
        if job.losses >= MOST_LOSSES or job.lost_count >= policy.attempts + (1 if job.output_hash else 0):
            return self._fail_lost(session, job, note.actor, claim)
        wait = timedelta(milliseconds=0 if at_once else policy.backoff_ms * 2 ** (job.losses - 1))
        self._changes.set(session, job.id, next_attempt_at=self._clock.now(wait))
        return self._ask_again(session, self._changes.get(session, job.id))

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
        """Fail a job that waits for `attempt`, which nobody can run; `JobLockConflict` where it doesn't wait for it.

        It is locked as that attempt and failed, whatever its due time or a pause; the history tells both, with the
        process that did it (`instance_id`; the actor's name without one).
        """

        instance = instance_id or actor
        token = f"{instance}/{secrets.token_hex(8)}"

        def end(session: Session) -> AiJob:
            waits_for_it = and_(WAITS, AiJob.attempt_no == attempt - 1, NOT_ASKED)
            if not self._changes.change(session, job_id, waits_for_it, **self._locked(token)):
                raise JobLockConflict(job_id, f"does not wait for attempt {attempt}")
            job = self._changes.get(session, job_id)
            record(session, self._clock, job, "locked", actor=actor, instance=instance)
            return self.mark_failed(claim_of(job), error, session, actor=actor)

        return self._in(session, end, ended(Claim(job_id, token, attempt)))

    # --- reading -----------------------------------------------------------------------------------------------

    def find_held(self, claim: Claim, event_id: str | None) -> Locked | None:
        """The job that is held under `claim`, as `lock_job` gave it; None where the claim is gone."""
        query = (
            select(AiJob, cast(AiJobSnapshot.content, Text))
            .outerjoin(AiJobSnapshot, and_(AiJobSnapshot.job_id == AiJob.id, AiJob.output_hash.is_(None)))
            .where(HELD)
        )
        with self._database.read() as session:
            found = session.execute(query, of(claim)).one_or_none()
            return Locked(found[0], event_id, found[1]) if found else None

    def find(self, job_id: str) -> AiJob | None:
        """The job as it is now."""
        with self._database.read() as session:
            return session.get(AiJob, job_id)

    def find_by_lifecycle_status(
        self, statuses: Sequence[str], queue_name: str | None = None, limit: int | None = None
    ) -> list[AiJob]:
        """Jobs in these states, oldest first."""
        query = select(AiJob).where(AiJob.lifecycle_status.in_(statuses)).order_by(AiJob.created_at, AiJob.id)
        if queue_name is not None:
            query = query.where(AiJob.queue_name == queue_name)
        with self._database.read() as session:
            return list(session.execute(query.limit(limit)).scalars())

    def find_expired_locks(
        self, threshold_ms: int | None = None, limit: int = 100, after: tuple[datetime, str] | None = None
    ) -> list[AiJob]:
        """Held jobs whose lease was last renewed over `threshold_ms` ago (lease and grace), longest lost first.

        `after` is (`lock_until`, id) of the last job of the page before.
        """
        threshold = timedelta(milliseconds=self._lease.threshold_ms if threshold_ms is None else threshold_ms)
        query = select(AiJob).where(
            AiJob.lifecycle_status == RUNNING,
            AiJob.locked_by.is_not(None),
            AiJob.lock_until <= self._clock.now(self._lease.length - threshold),
        )
        if after is not None:
            until, job_id = after
            # The first part alone is a range of the index.
            query = query.where(AiJob.lock_until >= until, or_(AiJob.lock_until > until, AiJob.id > job_id))
        with self._database.read() as session:
            return list(session.execute(query.order_by(AiJob.lock_until, AiJob.id).limit(limit)).scalars())

    # --- what the changes above have in common ------------------------------------------------------------------

    def _in(
        self,
        session: Session | None,
        work: Callable[[Session], T],
        settle: Callable[[Session], T | None] | None = None,
    ) -> T:
        """Run `work` in the caller's session, or in a transaction of its own."""
        return self._database.write(work, settle) if session is None else work(session)

    @staticmethod
    def _lock_lease(session: Session, claim: Claim, waits: bool) -> datetime | None:
        """Lock the job's row and return its `lock_until`. Unless it `waits`, `JobLockConflict` if another transaction
        has the row.
        """
        row = read_rows(session, _LEASE if waits else _LEASE_AT_HAND, of(claim.job_id)).one_or_none()
        if row is None:
            raise JobLockConflict(claim.job_id, "another transaction has its row")
        lock_until: datetime | None = row.lock_until
        return lock_until

    def _go_on_or_cancel(
        self, session: Session, claim: Claim, note: Note, *where: ColumnElement[bool], **values: Any
    ) -> AiJob:
        """A holder's last change, which a requested cancel overrules: then the job ends `cancelled` here.

        A call that is open still is given up as lost; whoever knows what came of it says so afterwards.
        """
        try:
            job = self._changes.held_change(session, claim, note, NOT_ASKED, *where, **values)
        except CancelRequested:
            return self._cancel(session, claim, Note(CANCELLED, note.actor, duration_ms=note.duration_ms), *where)
        mark_lost(session, self._clock, claim.job_id, claim.attempt_no)
        return job

    def _cancel(self, session: Session, who: str | Claim, note: Note, *where: ColumnElement[bool]) -> AiJob:
        if not self._changes.change(session, who, _ASKED, *where, **self._final(CANCELLED)):
            raise self._changes.refusal(session, who, cancelling=True)
        job_id, claim = (who.job_id, who) if isinstance(who, Claim) else (who, None)
        job = self._changes.get(session, job_id)
        self._changes.tell(session, job, note, claim)
        mark_lost(session, self._clock, job_id, job.attempt_no)
        return job

    def _fail_lost(self, session: Session, job: AiJob, actor: str, claim: Claim) -> AiJob:
        """End a job whose last allowed worker was lost; its lease was taken away in this transaction."""
        unheld = and_(AiJob.lifecycle_status == RUNNING, AiJob.locked_by.is_(None))
        why = f"its own process died {job.lost_count} times, shared ones {job.uncharged_losses} times"
        if not self._changes.change(session, job.id, unheld, **self._failed(JobErrorInfo.of(WORKER_LOST, why))):
            raise self._changes.refusal(session, job.id)
        failed = self._changes.get(session, job.id)
        self._changes.tell(session, failed, Note(FAILED, actor, WORKER_LOST), claim)
        return failed

    def _ask_again(self, session: Session, job: AiJob) -> AiJob:
        """Write the event for the next attempt of a job that still has one."""
        if job.lifecycle_status not in FINAL:
            self._outbox.ask(session, job, job.next_attempt_at)
        return job

    def _final(self, status: str, **values: Any) -> dict[str, Any]:
        return {
            "lifecycle_status": status,
            "finished_at": self._clock.now(),
            "next_attempt_at": None,
            **_FREE,
            **values,
        }

    def _failed(self, error: JobErrorInfo) -> dict[str, Any]:
        return self._final(
            FAILED,
            error_code=error.code,
            public_error_message=error.public_message,
            internal_error_message=error.internal_message or None,
        )
