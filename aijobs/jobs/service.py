"""The only door through which jobs come into being, and what users and operators may do to them afterwards.

Internal: the outside reaches it through business services, operators through retry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, undefer

from aijobs.ai.models import UserModelCredential
from aijobs.canonical import find_faults
from aijobs.db import Clock, Database, read_clock, savepoint
from aijobs.definitions.definition import PLATFORM_KEY, JobDefinition
from aijobs.definitions.registry import JobDefinitionRegistry, job_type_name
from aijobs.errors import ApiError, InputInvalid, JobGone
from aijobs.ids import new_id
from aijobs.jobs.chains import newest_of_chain
from aijobs.jobs.lifecycle import LifecycleRepository
from aijobs.jobs.models import AiJob, JobTombstone, QuotaUsage
from aijobs.jobs.requests import (
    CreateJobInput,
    Overrides,
    Terms,
    agree_terms,
    check_request,
    is_same_request,
    request_hash,
    validated_input,
)
from aijobs.jobs.snapshots import SnapshotBuilder, read_snapshot
from aijobs.jobs.status import CANCELLED, FAILED, FINAL
from aijobs.logs import get_logger, job_fields
from aijobs.outbox.repository import OutboxRepository, outgoing
from aijobs.queues.message import OutgoingMessage
from aijobs.settings import KeyRing

__all__ = ["AiJobService", "CreateJobInput", "CreatedJob", "Overrides"]

logger = get_logger(__name__)

HandOver = Callable[[OutgoingMessage], None]
"""What the creating process does with its own event after the commit; it doesn't raise."""


@dataclass(frozen=True)
class CreatedJob:
    """A job, and whether this request made it or found it."""

    job: AiJob
    created: bool


class AiJobService:
    """Creates, cancels and retries jobs. Opens the transactions; raises `ApiError` for what is refused."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        registry: JobDefinitionRegistry,
        lifecycle: LifecycleRepository,
        outbox: OutboxRepository,
        snapshots: SnapshotBuilder,
        message_keys: KeyRing,
        hand_over: HandOver,
        withdraw: Callable[[AiJob, OutgoingMessage | None], None],
        known_prompt: Callable[[str, str], bool],
        handover_delay: timedelta,
    ) -> None:
        """`hand_over` sends a new job's message; `withdraw` tells workers and broker of a requested cancel.

        A new job's event is due `handover_delay` ahead: the creator sends first, the dispatcher what was missed.
        """
        self._database, self._clock, self._registry = database, clock, registry
        self._lifecycle, self._outbox, self._snapshots = lifecycle, outbox, snapshots
        self._keys, self._hand_over, self._withdraw = message_keys, hand_over, withdraw
        self._known_prompt, self._handover_delay = known_prompt, handover_delay

    # --- create ------------------------------------------------------------------------------------------------

    def create_job(self, request: CreateJobInput) -> CreatedJob:
        """Create a job with its snapshot, enqueue event and first history row: all or nothing.

        A key that led to a job for the same request before answers with that job, whatever its state.
        Raises `UnknownJobType`, `InputInvalid`, and `ApiError` IDEMPOTENCY_KEY_REUSED.
        """
        definition = self._registry.get(job_type_name(request.job_type))
        check_request(request)
        content = validated_input(definition, request.input)
        terms = agree_terms(definition, request.overrides, self._known_prompt)
        with self._database.read() as session:
            existing = self._existing(session, definition, request)
        if existing is not None:
            return CreatedJob(existing, created=False)
        self._ensure_user_row(request.user_id)
        job = self._new_job(definition, request, terms)
        message: list[OutgoingMessage] = []

        def create(session: Session) -> CreatedJob:
            message.clear()
            self._lock_user(session, request.user_id)
            existing = self._existing(session, definition, request)
            if existing is not None:
                return CreatedJob(existing, created=existing.id == job["id"])
            self._check_credential(session, request.user_id, terms)
            fresh = AiJob(**job)
            inserted = self._insert(session, fresh, content)
            if inserted is None:
                winner = self._existing(session, definition, request)
                if winner is None:
                    raise ApiError("SERVICE_BUSY")
                return CreatedJob(winner, created=False)
            message.append(inserted)
            return CreatedJob(fresh, created=True)

        def settled(session: Session) -> CreatedJob | None:
            there = session.get(AiJob, job["id"])
            return CreatedJob(there, created=True) if there else None

        result = self._database.write(create, settled)
        self._after_commit(result, message)
        return result

    def _existing(self, session: Session, definition: JobDefinition, request: CreateJobInput) -> AiJob | None:
        """The job that this user's key led to before; refused where it was another request's."""
        if request.idempotency_key is None:
            return None
        by_key = {
            "user_id": request.user_id,
            "job_type": definition.job_type,
            "idempotency_key": request.idempotency_key,
        }
        job = session.execute(select(AiJob).filter_by(**by_key)).scalar()
        if job is not None:
            if not is_same_request(request, job.request_hash, self._keys):
                raise ApiError("IDEMPOTENCY_KEY_REUSED", {"jobId": job.id, "reason": "other_request"})
            return job
        tombstone = session.execute(select(JobTombstone).filter_by(**by_key)).scalar()
        if tombstone is not None:
            raise ApiError("IDEMPOTENCY_KEY_REUSED", {"jobId": tombstone.job_id, "reason": "expired"})
        return None

    def _new_job(self, definition: JobDefinition, request: CreateJobInput, terms: Terms) -> dict[str, Any]:
        job_id = new_id()
        keyed = request.idempotency_key is not None
        return {
            "id": job_id,
            "root_id": job_id,
            "user_id": request.user_id,
            "target_type": request.target_type,
            "target_id": request.target_id,
            "priority": terms.priority,
            "credential_mode": terms.credential_mode,
            "credential_id": terms.credential_id,
            "idempotency_key": request.idempotency_key,
            "request_hash": request_hash(request, self._keys) if keyed else None,
            "trigger_type": "user",
            **_of_today(definition),
            "prompt_version": terms.prompt_version,
            "output_schema_version": terms.output_schema_version,
        }

    def _insert(self, session: Session, job: AiJob, content: Mapping[str, Any]) -> OutgoingMessage | None:
        """Write job, snapshot, history and event; None where a unique constraint says that another was first."""
        job.created_at = read_clock(session, self._clock)
        try:
            with savepoint(session):
                self._lifecycle.create_job(session, job)
        except IntegrityError:
            return None
        session.add(self._snapshots.build(session, job.id, job.input_schema_version, content))
        event = self._outbox.add_enqueue(session, job, job.created_at + self._handover_delay)
        session.flush()
        return outgoing(event, job)

    def _after_commit(self, result: CreatedJob, message: list[OutgoingMessage]) -> None:
        if not result.created:
            return
        job = result.job
        logger.info("job.created", **job_fields(job, outboxId=message[0].event_id if message else None))
        if message:
            self._hand_over(message[0])

    def _ensure_user_row(self, user_id: str) -> None:
        """Make the user's row in a transaction of its own: made and locked in one, two creators would deadlock."""
        with self._database.read() as session:
            if session.get(QuotaUsage, user_id) is not None:
                return

        def add(session: Session) -> None:
            # Where another request was first the row is there, which is all that is needed.
            with suppress(IntegrityError), savepoint(session):
                session.add(QuotaUsage(user_id=user_id, created_at=self._clock.now()))

        self._database.write(add)

    def _lock_user(self, session: Session, user_id: str) -> None:
        session.execute(select(QuotaUsage.user_id).where(QuotaUsage.user_id == user_id).with_for_update()).scalar()

    def _check_credential(self, session: Session, user_id: str, terms: Terms) -> None:
        if terms.credential_mode == PLATFORM_KEY:
            return
        credential = session.get(UserModelCredential, terms.credential_id)
        if credential is None or credential.user_id != user_id:
            raise InputInvalid([("credentialId", "is no credential of this user")])

    # --- cancel ------------------------------------------------------------------------------------------------

    def cancel(self, job_id: str, by: str, *, user_id: str | None = None, strict: bool = False) -> AiJob:
        """Ask for a job to be cancelled, and return it as it is then; a final job as it is.

        With `user_id`, somebody else's job and no job are alike: JOB_NOT_FOUND. JOB_NOT_CANCELLABLE where the
        definition forbids it; with `strict` also for a final job (JOB_ALREADY_CANCELLED for a cancelled one).
        """
        job = self._find(job_id, user_id)
        if job.lifecycle_status not in FINAL:
            definition = self._registry.find(job.job_type)
            if definition is not None and not definition.execution.cancellable:
                raise ApiError("JOB_NOT_CANCELLABLE")
            waiting = self._waiting_message(job)
            job = self._request_cancel(job_id, by)
            if job.cancel_requested_at is not None:
                logger.info("job.cancel_requested", **job_fields(job))
                self._withdraw(job, waiting)
                return job
        if strict:
            raise ApiError("JOB_ALREADY_CANCELLED" if job.lifecycle_status == CANCELLED else "JOB_NOT_CANCELLABLE")
        return job

    def _request_cancel(self, job_id: str, by: str) -> AiJob:
        try:
            return self._lifecycle.request_cancel(job_id, by)
        except JobGone:
            raise ApiError("JOB_NOT_FOUND") from None

    def _find(self, job_id: str, user_id: str | None) -> AiJob:
        with self._database.read() as session:
            job = session.get(AiJob, job_id)
        if job is None or (user_id is not None and job.user_id != user_id):
            raise ApiError("JOB_NOT_FOUND")
        return job

    def _waiting_message(self, job: AiJob) -> OutgoingMessage | None:
        """The message that may lie in the broker for a job that no worker holds."""
        if job.locked_by is not None:
            return None
        with self._database.read() as session:
            event = self._outbox.enqueue_event(session, job)
            return outgoing(event, job) if event else None

    # --- retry -------------------------------------------------------------------------------------------------

    def retry(self, job_id: str, by: str) -> CreatedJob:
        """Run a failed or cancelled job again, as a new job; the old row is not changed.

        Asked again while the child is the newest and not final: the same child. JOB_NOT_RETRYABLE with a `reason`
        (not_final, succeeded, superseded, snapshot_expired, input_outdated, credential_gone, unknown_job_type) else.
        """
        parent = self._find(job_id, None)
        message: list[OutgoingMessage] = []
        child_id = new_id()

        def retry(session: Session) -> CreatedJob:
            message.clear()
            self._lock_user(session, parent.user_id)
            job = session.execute(
                select(AiJob).where(AiJob.id == job_id).options(undefer(AiJob.validated_output))
            ).scalar()
            if job is None:  # Its retention was over in this very moment.
                raise ApiError("JOB_NOT_FOUND")
            live = self._live_child(session, job)
            if live is not None:
                return CreatedJob(live, created=live.id == child_id)
            child, content = self._child(session, job, child_id)
            inserted = self._insert(session, child, content)
            if inserted is None:
                winner = self._live_child(session, job)
                if winner is None:
                    raise ApiError("SERVICE_BUSY")
                return CreatedJob(winner, created=False)
            message.append(inserted)
            return CreatedJob(child, created=True)

        def settled(session: Session) -> CreatedJob | None:
            there = session.get(AiJob, child_id)
            return CreatedJob(there, created=True) if there else None

        self._ensure_user_row(parent.user_id)
        result = self._database.write(retry, settled)
        logger.info("job.retried", by=by, parentJobId=job_id, **job_fields(result.job))
        self._after_commit(result, message)
        return result

    def _live_child(self, session: Session, job: AiJob) -> AiJob | None:
        """The job's child where it is the newest of the chain and not final; refused where the chain went on."""
        child = session.execute(select(AiJob).where(AiJob.parent_job_id == job.id)).scalar()
        if child is None:
            return None
        newest = newest_of_chain(session, job.root_id) or child
        if newest.id == child.id and child.lifecycle_status not in FINAL:
            return child
        raise _not_retryable("superseded", newestJobId=newest.id)

    def _child(self, session: Session, job: AiJob, child_id: str) -> tuple[AiJob, Mapping[str, Any]]:
        """The new job of a retry and its input; JOB_NOT_RETRYABLE where there can't be one."""
        if job.lifecycle_status not in (FAILED, CANCELLED):
            raise _not_retryable("succeeded" if job.lifecycle_status in FINAL else "not_final")
        definition = self._registry.find(job.job_type)
        if definition is None:
            raise _not_retryable("unknown_job_type")
        if job.credential_mode != PLATFORM_KEY and job.credential_id is None:
            raise _not_retryable("credential_gone")
        child = AiJob(
            id=child_id,
            root_id=job.root_id,
            parent_job_id=job.id,
            user_id=job.user_id,
            target_type=job.target_type,
            target_id=job.target_id,
            priority=job.priority,
            credential_mode=job.credential_mode,
            credential_id=job.credential_id,
            trigger_type="admin",
            **_of_today(definition),
        )
        same_versions = all(
            getattr(child, version) == getattr(job, version)
            for version in ("prompt_version", "input_schema_version", "output_schema_version")
        )
        if job.output_hash is not None and same_versions:
            child.validated_output, child.output_hash = job.validated_output, job.output_hash
        return child, self._input_again(session, job, definition)

    def _input_again(self, session: Session, job: AiJob, definition: JobDefinition) -> Mapping[str, Any]:
        snapshot = read_snapshot(session, job.id)
        if snapshot is not None:
            content: Mapping[str, Any] = snapshot.content
            same = snapshot.schema_version == definition.input.schema_version
            return content if same else _input_of_today(definition, content)
        rebuilt = definition.rebuild(job.target_type, job.target_id) if definition.rebuild else None
        if rebuilt is None:
            raise _not_retryable("snapshot_expired")
        return _input_of_today(definition, rebuilt)


def _of_today(definition: JobDefinition) -> dict[str, Any]:
    """What a job takes from its definition as it is now."""
    return {
        "job_type": definition.job_type,
        "queue_name": definition.queue.queue_name,
        "max_retry_count": definition.execution.max_retries,
        "input_schema_version": definition.input.schema_version,
        "output_schema_version": definition.output.schema_version,
        "prompt_version": definition.prompt.version if definition.prompt else None,
    }


def _input_of_today(definition: JobDefinition, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Old content as today's schema has it, whose version it is labelled with.

    JOB_NOT_RETRYABLE where today's schema refuses it: nobody who retries has fields to mend.
    """
    try:
        if faults := list(find_faults(content)):
            raise InputInvalid(faults)
        return validated_input(definition, content)
    except InputInvalid as refused:
        raise _not_retryable("input_outdated", inputSchemaVersion=definition.input.schema_version) from refused


def _not_retryable(reason: str, **details: Any) -> ApiError:
    return ApiError("JOB_NOT_RETRYABLE", {"reason": reason, **details})
