"""Stage 1, PREPARE: the definition, the job, and the lock by compare-and-set."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from aijobs.db import Clock, Database
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.engine.failure import DatabaseTrouble
from aijobs.engine.progress import Progress
from aijobs.engine.run import Run
from aijobs.engine.token import CancellationToken
from aijobs.errors import JobLockConflict
from aijobs.jobs.history import WORKER
from aijobs.jobs.lifecycle import DUE_AT, JobErrorInfo, LifecycleRepository, claim_of
from aijobs.jobs.models import AiJob
from aijobs.logs import Outage, Sparing, get_logger, job_fields
from aijobs.outbox.keys import enqueue_key
from aijobs.outbox.models import OutboxEvent
from aijobs.outbox.repository import OutboxRepository
from aijobs.queues.message import JobMessage

logger = get_logger(__name__)

UNKNOWN_TYPE_PATIENCE = timedelta(hours=1)
UNKNOWN_TYPE_REDRIVES = 3
"""A job of a type that workers don't know is given up once it was due so long and sent again so often."""


class Prepare:
    """Takes the job of a message, or says why not."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        registry: JobDefinitionRegistry,
        lifecycle: LifecycleRepository,
        outbox: OutboxRepository,
        instance_id: str,
    ) -> None:
        self._database, self._clock, self._registry = database, clock, registry
        self._lifecycle, self._outbox, self._instance_id = lifecycle, outbox, instance_id
        self._sparing = Sparing()
        self._trouble = DatabaseTrouble(logger, Outage(logger, "progress.database"), "progress.failed")

    def take(self, message: JobMessage) -> Run | None:
        """Lock the job for a new attempt; None where its type is unknown here, or it can't be locked now."""
        definition = self._registry.find(message.job_type)
        if definition is None:
            self._leave_unknown(message)
            return None
        try:
            job = self._lifecycle.lock_job(message.job_id, self._instance_id)
        except JobLockConflict:
            fields = job_fields(jobId=message.job_id, jobType=message.job_type)
            logger.info("job.not_taken", reason="held, final, not due, paused, or not there", **fields)
            return None
        claim = claim_of(job)
        progress = Progress(lambda percent: self._lifecycle.report_progress(claim, percent, tries=1), self._trouble)
        return Run(job, claim, definition, CancellationToken(definition.execution.timeout_ms / 1000, progress.show))

    def database_answers(self) -> bool:
        """Whether the database can be asked anything now."""
        try:
            with self._database.read() as session:
                session.execute(select(1))
        except SQLAlchemyError:
            return False
        return True

    def note_event(self, run: Run) -> None:
        """Learn which outbox event asked for this attempt, and write the line that tells of the lock."""
        key = enqueue_key(run.job, run.claim.attempt_no)
        with self._database.read() as session:
            run.outbox_id = session.execute(select(OutboxEvent.id).where(OutboxEvent.dedupe_key == key)).scalar()
        logger.info("job.locked", **run.fields())

    def _leave_unknown(self, message: JobMessage) -> None:
        """Take no lock: the re-drive sends the message again, to a worker that may know the type."""
        fields = job_fields(jobId=message.job_id, jobType=message.job_type)
        if (held_back := self._sparing.may_say(message.job_type)) is not None:
            logger.warning("job.type_unknown", alsoDropped=held_back, **fields)
        with self._database.read() as session:
            job = session.execute(
                select(AiJob).where(AiJob.id == message.job_id, DUE_AT <= self._clock.now(-UNKNOWN_TYPE_PATIENCE))
            ).scalar()
            event = self._outbox.enqueue_event(session, job) if job else None
        if job is None or event is None or event.redrives < UNKNOWN_TYPE_REDRIVES:
            return
        error = JobErrorInfo.of("INTERNAL_UNKNOWN_JOB_TYPE", f"no worker knows the job type {message.job_type!r}")
        try:
            given_up = self._lifecycle.give_up(
                job.id, job.attempt_no + 1, error, actor=WORKER, instance_id=self._instance_id
            )
        except JobLockConflict:
            return  # Another worker knew the type after all, or gave it up first.
        logger.error("job.given_up", **job_fields(given_up, outboxId=event.id))
