"""Retention: delete old jobs with all their rows, and leave tombstones.

A chain of retries is deleted as a whole, once its newest job ended long enough ago. Business rows stay. Old tombstones
and sessions of operators are deleted too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import delete, select
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from aijobs.db.clock import Clock, read_clock
from aijobs.db.database import Database
from aijobs.db.statements import change_rows
from aijobs.db.steps import Steps
from aijobs.jobs.models import (
    AiJob,
    JobTombstone,
    QuotaUsage,
)
from aijobs.jobs.status import FINAL
from aijobs.logs import fault, get_logger
from aijobs.operators.models import OperatorSession
from aijobs.outbox.models import OutboxEvent

logger = get_logger(__name__)


@dataclass(frozen=True)
class Pruned:
    """The number of deleted rows."""

    jobs: int = 0
    tombstones: int = 0
    failed: int = 0
    """Chains that could not be deleted. The next run tries again."""
    sessions: int = 0


class Retention:
    """Deletes one chain a transaction, with rests on SQLite, so that traffic goes on."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        keep_jobs: timedelta,
        keep_tombstones: timedelta,
        keep_sessions: timedelta,
        batch: int = 50,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`keep_jobs` counts from a job's end, `keep_tombstones` from its deletion, `keep_sessions` from a sign-in.
        `progress` is called after each deletion.
        """
        self._database, self._clock, self._batch = database, clock, batch
        self._steps = Steps(database, progress=progress)
        self._keep_jobs, self._keep_tombstones, self._keep_sessions = keep_jobs, keep_tombstones, keep_sessions

    def run(self) -> Pruned:
        """Delete all that is old enough. A chain that can't be deleted stops no other."""
        jobs, failed, after = 0, 0, ""
        while chains := self._old_chains(after):
            after = chains[-1]
            for root_id in chains:
                try:
                    jobs += self._steps.write(partial(self._delete_chain, root_id=root_id))
                except Exception as error:
                    # For example, a plug-in's table may refer to one of its jobs.
                    logger.error("retention.failed", rootId=root_id, **fault(error))
                    failed += 1
        tombstones = self._delete_old(JobTombstone.job_id, JobTombstone.deleted_at, self._keep_tombstones)
        sessions = self._delete_old(OperatorSession.id, OperatorSession.created_at, self._keep_sessions)
        if jobs or tombstones:
            logger.info("jobs.pruned", jobs=jobs, tombstones=tombstones, failed=failed)
        return Pruned(jobs, tombstones, failed, sessions)

    def _old_chains(self, after: str) -> Sequence[str]:
        """Return the root ids after `after` of chains whose newest job ended long ago."""
        child = aliased(AiJob)
        has_child = select(child.id).where(child.parent_job_id == AiJob.id).exists()
        with self._database.read() as session:
            return (
                session.execute(
                    select(AiJob.root_id)
                    .where(
                        AiJob.lifecycle_status.in_(FINAL),
                        AiJob.finished_at <= self._clock.now(-self._keep_jobs),
                        ~has_child,
                        AiJob.root_id > after,
                    )
                    .order_by(AiJob.root_id)
                    .limit(self._batch)
                )
                .scalars()
                .all()
            )

    def _delete_chain(self, session: Session, root_id: str) -> int:
        """Delete one chain and leave tombstones for its keys. Nothing if it has grown meanwhile."""
        user_id = session.execute(select(AiJob.user_id).where(AiJob.root_id == root_id).limit(1)).scalar()
        # The user's row first, as everywhere: while it is locked no retry can add a job to the chain.
        session.execute(select(QuotaUsage.user_id).where(QuotaUsage.user_id == user_id).with_for_update())
        jobs = session.execute(select(AiJob).where(AiJob.root_id == root_id).with_for_update()).scalars().all()
        ends = [job.finished_at for job in jobs]
        cutoff = read_clock(session, self._clock) - self._keep_jobs
        if not jobs or any(end is None or end > cutoff for end in ends):
            return 0
        ids = [job.id for job in jobs]
        self._leave_tombstones(session, jobs)
        change_rows(session, delete(OutboxEvent).where(OutboxEvent.aggregate_id.in_(ids)))
        # The other rows of a job are deleted by their foreign keys: each statement here makes others wait.
        return change_rows(session, delete(AiJob).where(AiJob.id.in_(ids), AiJob.lifecycle_status.in_(FINAL)))

    def _leave_tombstones(self, session: Session, jobs: Sequence[AiJob]) -> None:
        now = read_clock(session, self._clock)
        for job in jobs:
            if job.idempotency_key is not None and job.request_hash is not None:
                session.add(
                    JobTombstone(
                        job_id=job.id,
                        user_id=job.user_id,
                        job_type=job.job_type,
                        idempotency_key=job.idempotency_key,
                        request_hash=job.request_hash,
                        deleted_at=now,
                    )
                )
        session.flush()

    def _delete_old(self, key: InstrumentedAttribute[str], at: InstrumentedAttribute[datetime], keep: timedelta) -> int:
        """Delete the rows of `key`'s table whose `at` is longer ago than `keep`. Return their number."""

        def delete_some(session: Session) -> int:
            query = select(key).where(at <= self._clock.now(-keep)).limit(self._batch)
            old = session.execute(query).scalars().all()
            return change_rows(session, delete(key.class_).where(key.in_(old))) if old else 0

        deleted = 0
        while count := self._steps.write(delete_some):
            deleted += count
        return deleted
