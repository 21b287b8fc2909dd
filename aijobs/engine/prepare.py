"""Stage 1, PREPARE: the definition, the job, and its lease."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import select

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.definitions.definition import PLATFORM_KEY, JobDefinition
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.engine.failure import ErrorLog
from aijobs.engine.progress import Progress
from aijobs.engine.run import Run
from aijobs.engine.token import CancellationToken
from aijobs.jobs.conditions import DUE_AT
from aijobs.jobs.errors import AnotherUserNext, JobLockConflict, RunsAlone
from aijobs.jobs.history import WORKER
from aijobs.jobs.lease import JobErrorInfo, Locked, lease_of
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.models import AiJob
from aijobs.logs import Outage, Sparing, get_logger, job_fields
from aijobs.outbox.repository import OutboxRepository, outgoing
from aijobs.queues.message import JobMessage, OutgoingMessage

logger = get_logger(__name__)

MAX_LOCK_ATTEMPTS = 5
"""Maximum lock attempts per message when fairness sends the worker to another user's job."""
UNKNOWN_TYPE_PATIENCE = timedelta(hours=1)
UNKNOWN_TYPE_REDRIVES = 3
"""A job of a type that workers don't know is given up once it was due for so long and was sent again so often."""


class Prepare:
    """Locks the job of a message."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        registry: JobDefinitionRegistry,
        lifecycle: LifecycleRepository,
        outbox: OutboxRepository,
        instance_id: str,
        put_back: Callable[[OutgoingMessage], None],
        make_ready: Callable[[JobDefinition, str], None] = lambda definition, credential_mode: None,
    ) -> None:
        """`put_back` returns the message of a job that must wait to the broker. It doesn't raise. `make_ready` loads
        what calls under a credential mode need, before the attempt's time begins.
        """
        self._put_back, self._make_ready = put_back, make_ready
        self._database, self._clock, self._registry = database, clock, registry
        self._lifecycle, self._outbox, self._instance_id = lifecycle, outbox, instance_id
        self._sparing = Sparing()
        self._error_log = ErrorLog(logger, Outage(logger, "progress.database"), "progress.failed")

    def take(self, message: JobMessage, *, suspects: bool = True) -> Run | None:
        """Lock the job for a new attempt, or another user's job if fairness says so.

        None if its type is unknown here, or if nothing can be locked now. `RunsAlone` if it is a suspect and `suspects`
        is false.
        """
        definition = self._registry.find(message.job_type)
        if definition is None:
            self._leave_unknown(message)
            return None
        self._make_ready(definition, PLATFORM_KEY)  # Before the lock: the lease isn't renewed until the run exists.
        try:
            locked = self._lock(message, suspects)
        except JobLockConflict as refused:
            is_other = isinstance(refused, AnotherUserNext)
            reason = "another user is next" if is_other else "held, final, not due, or paused"
            logger.info("job.not_taken", reason=reason, **_fields(message))
            return None
        run = self.begin(locked)
        logger.info("job.locked", **run.fields())
        return run

    def begin(self, locked: Locked, seconds: float | None = None) -> Run:
        """Return the attempt of a job that was just locked. Its time is `seconds`, or its definition's."""
        definition, lease = self._registry.get(locked.job.job_type), lease_of(locked.job, locked.event_id)
        # Again: it may be another job than the message's, or use a user's own key.
        self._make_ready(definition, locked.job.credential_mode)
        progress = Progress(lambda percent: self._lifecycle.report_progress(lease, percent, tries=1), self._error_log)
        limit_s = definition.execution.timeout_ms / 1000 if seconds is None else seconds
        token = CancellationToken(limit_s, progress.show)
        return Run(locked.job, lease, definition, token, locked.event_id, locked.content)

    def _lock(self, message: JobMessage, suspects: bool) -> Locked:
        """Lock the message's job, or the one that fairness names: the slot is free and must not idle.

        The message of a job that must wait is put back before another is locked, so that it can't be lost.
        """
        known = [definition.job_type for definition in self._registry.get_all()]
        wanted, is_back = message.job_id, False
        for lock_attempt in range(1, MAX_LOCK_ATTEMPTS + 1):
            try:
                event_id = message.event_id if wanted == message.job_id else None
                return self._lifecycle.lock_job(wanted, self._instance_id, known, event_id=event_id, suspects=suspects)
            except AnotherUserNext as refused:
                if not is_back:
                    self._return_message(message)
                    is_back = True
                if lock_attempt == MAX_LOCK_ATTEMPTS:
                    raise
                wanted = refused.instead
            except (JobLockConflict, RunsAlone):
                if wanted == message.job_id or lock_attempt == MAX_LOCK_ATTEMPTS:
                    raise
                wanted = message.job_id  # Another worker locked the other job first.
        raise AssertionError("unreachable: the last lock attempt returns or raises")

    def _return_message(self, message: JobMessage) -> None:
        with self._database.read() as session:
            job = session.get(AiJob, message.job_id)
            event = self._outbox.enqueue_event(session, job) if job else None
        if job is None or event is None:
            return
        logger.info("job.turn_given", **job_fields(job, outboxId=event.id))
        self._put_back(outgoing(event, job))

    def database_answers(self) -> bool:
        """Return whether the database answers a query now."""
        return self._database.answers()

    def _leave_unknown(self, message: JobMessage) -> None:
        """Lock nothing: the re-drive sends the message again, to a worker that may know the type."""
        fields = _fields(message)
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


def _fields(message: JobMessage) -> dict[str, Any]:
    return job_fields(jobId=message.job_id, jobType=message.job_type)
