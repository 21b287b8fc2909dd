"""The reaper: find expired leases and leases of dead processes, and give their jobs a next attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.db.database import Database
from aijobs.db.steps import Steps
from aijobs.ids import InstanceId
from aijobs.jobs.errors import JobLockConflict, LifecycleError
from aijobs.jobs.lease import lease_of
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.models import AiJob
from aijobs.logs import fault, get_logger, job_fields

logger = get_logger(__name__)

BATCH = 25
"""Leases taken in one transaction."""
REST = 1.0
"""The rest after a batch on SQLite, as a part of the batch's time, so that others can write."""

Taken = list[tuple[AiJob, AiJob]]
"""Jobs before and after."""


class LockReaper:
    """Takes lost leases, a batch a transaction.

    A lease that can't be taken stops no other. One that was renewed, or whose row another transaction has locked, is
    skipped. After any other error each lease of the batch is taken alone.
    """

    def __init__(
        self,
        database: Database,
        lifecycle: LifecycleRepository,
        page: int = BATCH,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`progress` is called after each batch."""
        self._database, self._lifecycle, self._page = database, lifecycle, page
        self._steps = Steps(database, rest=REST, progress=progress)

    def reap(self) -> int:
        """Take every lease that was not renewed for lease and grace. Return their number."""
        return sum(self._take(batch, at_once=False) for batch in self._expired())

    def reap_dead(self, observer: InstanceId) -> int:
        """Take at once the leases of dead processes on the observer's host. Return their number."""
        return sum(self._take(batch, at_once=True) for batch in self._held_by_dead(observer))

    def finds_hidden(self, observer: InstanceId) -> bool:
        """Return whether a process of the observer's host holds a lease, and the observer can't tell if it lives.

        After a container was started again, that is the worker that ran in it before.
        """
        after = observer.host_prefix
        while page := self._held_on(observer, after):
            holder = InstanceId.parse(page[0].locked_by or "")
            if holder is not None and holder.is_hidden_from(observer):
                return True
            after = f"{lease_of(page[0]).instance}/~"  # After all its tokens, as below.
        return False

    # --- finding -----------------------------------------------------------------------------------------------

    def _expired(self) -> Iterator[Sequence[AiJob]]:
        after: tuple[datetime, str] | None = None
        while page := self._lifecycle.find_expired_locks(limit=self._page, after=after):
            yield page
            last = page[-1]
            if last.lock_until is None:
                return
            after = (last.lock_until, last.id)

    def _held_by_dead(self, observer: InstanceId) -> Iterator[Sequence[AiJob]]:
        """Yield batches of leases of one dead process each. Those of a process that may live are skipped at once."""
        after = observer.host_prefix
        while page := self._held_on(observer, after):
            instance = lease_of(page[0]).instance
            holder = InstanceId.parse(page[0].locked_by or "")
            if holder is not None and holder.is_dead_beside(observer):
                batch = [job for job in page if lease_of(job).instance == instance]
                yield batch
                after = lease_of(batch[-1]).token
            else:
                after = f"{instance}/~"  # After all its tokens, whose second part is hexadecimal.

    def _held_on(self, observer: InstanceId, after: str) -> Sequence[AiJob]:
        """Return the next leases of processes on the observer's host, in the order of their tokens."""
        first = observer.host_prefix
        last = first[:-1] + chr(ord(first[-1]) + 1)
        # A held job is running. With that condition SQLite would choose the index of all running jobs.
        query = select(AiJob).where(AiJob.locked_by > after, AiJob.locked_by < last)
        with self._database.read() as session:
            return session.execute(query.order_by(AiJob.locked_by).limit(self._page)).scalars().all()

    # --- taking ------------------------------------------------------------------------------------------------

    def _take(self, jobs: Sequence[AiJob], *, at_once: bool) -> int:
        taken: Taken = []
        busy: list[AiJob] = []

        def take(session: Session) -> Taken:
            taken.clear()
            busy.clear()
            for job in jobs:
                try:
                    taken.append((job, self._expire(job, session, at_once=at_once)))
                except LifecycleError as refused:
                    if at_once and isinstance(refused, JobLockConflict):
                        busy.append(job)  # The server may not know yet that the holder is gone.
                    else:
                        _pass_over(job, refused)
            return taken

        def confirm(session: Session) -> Taken | None:
            tokens = [job.locked_by for job, _ in taken]
            held = session.execute(select(AiJob.id).where(AiJob.locked_by.in_(tokens)).limit(1)).scalar()
            return taken if held is None else None

        try:
            self._steps.write(take, confirm)
        except Exception:  # Take each lease alone, which logs failures.
            return sum(self._take_alone(job, at_once=at_once) for job in jobs)
        for job, after in taken:
            _log(job, after)
        return len(taken) + sum(self._take_alone(job, at_once=True) for job in busy)

    def _take_alone(self, job: AiJob, *, at_once: bool) -> int:
        try:
            after = self._expire(job, None, at_once=at_once)
        except LifecycleError as refused:
            _pass_over(job, refused)
            return 0
        except Exception as error:
            logger.error("reaper.failed", **fault(error), **job_fields(job))
            return 0
        _log(job, after)
        return 1

    def _expire(self, job: AiJob, session: Session | None, *, at_once: bool) -> AiJob:
        if job.lock_until is None:
            raise JobLockConflict(job.id, "has no lease")
        return self._lifecycle.expire(lease_of(job), job.lock_until, session, at_once=at_once)


def _pass_over(job: AiJob, refused: LifecycleError) -> None:
    """A renewal, the holder or another reaper came first, which is what the compare-and-set is for."""
    logger.debug("reaper.passed_over", holder=lease_of(job).instance, why=type(refused).__name__, **job_fields(job))


def _log(job: AiJob, after: AiJob) -> None:
    logger.warning(
        "job.lease_lost",
        holder=lease_of(job).instance,
        lostCount=after.lost_count,
        unchargedLosses=after.uncharged_losses,
        **job_fields(after, attemptNo=job.attempt_no),
    )
