"""Finds leases that ran out, and leases whose holders are known to be gone, and gives their jobs a next attempt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from sqlalchemy import select

from aijobs.db.database import Database
from aijobs.errors import LifecycleError
from aijobs.ids import InstanceId
from aijobs.jobs.lifecycle import LifecycleRepository, claim_of
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import RUNNING
from aijobs.logs import fault, get_logger, job_fields

logger = get_logger(__name__)


class LockReaper:
    """Takes lost leases away, page by page, one transaction a job: one that can't be taken stops no other."""

    def __init__(self, database: Database, lifecycle: LifecycleRepository, page: int = 100) -> None:
        self._database, self._lifecycle, self._page = database, lifecycle, page

    def reap(self) -> int:
        """Take every lease that was not renewed for lease and grace; how many were taken."""
        return sum(self._take(job, at_once=False) for job in self._expired())

    def give_back_dead(self, observer: InstanceId) -> int:
        """Take at once what dead processes of the observer's own host held; how many leases were taken."""
        held = self._held_on(observer)
        gone = [
            job for job in held if (holder := InstanceId.parse(job.locked_by or "")) and holder.is_dead_beside(observer)
        ]
        return sum(self._take(job, at_once=True) for job in gone)

    def _expired(self) -> Iterator[AiJob]:
        after: tuple[datetime, str] | None = None
        while page := self._lifecycle.find_expired_locks(limit=self._page, after=after):
            yield from page
            last = page[-1]
            if last.lock_until is None:
                return
            after = (last.lock_until, last.id)

    def _held_on(self, observer: InstanceId) -> Iterable[AiJob]:
        with self._database.read() as session:
            return list(
                session.execute(
                    select(AiJob).where(
                        AiJob.lifecycle_status == RUNNING,
                        AiJob.locked_by.startswith(observer.host_prefix, autoescape=True),
                    )
                ).scalars()
            )

    def _take(self, job: AiJob, *, at_once: bool) -> int:
        if job.lock_until is None:
            return 0
        claim = claim_of(job)
        try:
            after = self._lifecycle.expire(claim, job.lock_until, at_once=at_once)
        except LifecycleError:
            return 0  # A beat, the holder or another reaper came first: exactly what the compare-and-set is for.
        except Exception as error:
            logger.error("reaper.failed", **fault(error), **job_fields(job))
            return 0
        logger.warning(
            "job.lease_lost",
            holder=claim.instance,
            lostCount=after.lost_count,
            unchargedLosses=after.uncharged_losses,
            **job_fields(after, attemptNo=job.attempt_no),
        )
        return 1
