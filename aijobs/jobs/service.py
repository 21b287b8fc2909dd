"""The only door through which jobs come into being, and what users and operators may do to them afterwards.

Internal: the outside reaches it through business services, operators through retry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.definitions.definition import PLATFORM_KEY, JobDefinition
from aijobs.definitions.registry import JobDefinitionRegistry, job_type_name
from aijobs.errors import ApiError, InputInvalid, JobGone
from aijobs.ids import new_id
from aijobs.jobs.creation import CreatedJob, JobCreation, of_today, refused_if_too_large
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.models import AiJob, JobTombstone
from aijobs.jobs.requests import (
    CreateJobInput,
    Overrides,
    Terms,
    UnavailableFor,
    agree_terms,
    can_have_led_to_a_job,
    check_request,
    is_same_request,
    request_hash,
    validated_input,
)
from aijobs.jobs.retries import Retries
from aijobs.jobs.status import CANCELLED, FINAL
from aijobs.jobs.users import ensure_user_row, lock_user_row
from aijobs.logs import get_logger, job_fields
from aijobs.outbox.repository import OutboxRepository, outgoing
from aijobs.queues.message import OutgoingMessage
from aijobs.screening.redaction import redact
from aijobs.settings import KeyRing

__all__ = ["AiJobService", "CreateJobInput", "CreatedJob", "Overrides"]

logger = get_logger(__name__)

OwnsCredential = Callable[[Session, str, str, str | None], bool]
"""Whether a user has a credential of this mode with this id."""


class AiJobService:
    """Creates, cancels and retries jobs. Opens the transactions; raises `ApiError` for what is refused."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        registry: JobDefinitionRegistry,
        lifecycle: LifecycleRepository,
        outbox: OutboxRepository,
        creation: JobCreation,
        message_keys: KeyRing,
        withdraw: Callable[[AiJob, OutgoingMessage | None], None],
        known_prompt: Callable[[str, str], bool],
        unavailable_for: UnavailableFor,
        owns_credential: OwnsCredential,
    ) -> None:
        """`withdraw` tells workers and broker of a requested cancel; `unavailable_for` is asked before a job is made,
        outside of any transaction.
        """
        self._database, self._clock, self._registry = database, clock, registry
        self._lifecycle, self._outbox, self._creation = lifecycle, outbox, creation
        self._keys, self._withdraw, self._known_prompt = message_keys, withdraw, known_prompt
        self._unavailable_for, self._owns_credential = unavailable_for, owns_credential
        self._retries = Retries(database, clock, registry, creation, unavailable_for)

    # --- create ------------------------------------------------------------------------------------------------

    def create_job(self, request: CreateJobInput) -> CreatedJob:
        """Create a job with its snapshot, enqueue event and first history row: all or nothing.

        A key that led to a job for the same request before answers with that job, whatever its state, before any other
        check and in any outage. Raises `UnknownJobType`, `InputInvalid`, and `ApiError` IDEMPOTENCY_KEY_REUSED,
        PLATFORM_UNAVAILABLE, TOO_MANY_JOBS, QUOTA_EXCEEDED and PAYLOAD_TOO_LARGE.
        """
        definition = self._registry.get(job_type_name(request.job_type))
        # Before the checks: a request that led to a job once gets it, even if it breaks a newer rule.
        with self._database.read() as session:
            existing = self._existing(session, definition, request)
        if existing is not None:
            return CreatedJob(existing, created=False)
        check_request(request)
        content = validated_input(definition, request.input)
        terms = agree_terms(definition, request.overrides, self._known_prompt)
        if terms.credential_mode != PLATFORM_KEY:
            with self._database.read() as session:
                # Before the breaker: its state is nobody's business but the owner's.
                self._check_credential(session, request.user_id, terms)
        wait = self._unavailable_for(definition, terms.credential_mode, terms.credential_id)
        if wait is not None:
            raise ApiError("PLATFORM_UNAVAILABLE", retry_after=wait)
        redacted = redact(content)
        ensure_user_row(self._database, self._clock, request.user_id)
        job = self._new_job(definition, request, terms)
        message: list[OutgoingMessage] = []

        def create(session: Session) -> CreatedJob:
            message.clear()
            lock_user_row(session, request.user_id)
            existing = self._existing(session, definition, request)
            if existing is not None:
                return CreatedJob(existing, created=existing.id == job["id"])
            self._check_credential(session, request.user_id, terms)
            fresh = AiJob(**job)
            inserted = self._creation.insert(session, fresh, definition, redacted)
            if inserted is None:
                winner = self._existing(session, definition, request)
                if winner is None:
                    raise ApiError("SERVICE_BUSY")
                return CreatedJob(winner, created=False)
            message.append(inserted)
            return CreatedJob(fresh, created=True)

        def confirm(session: Session) -> CreatedJob | None:
            there = session.get(AiJob, job["id"])
            return CreatedJob(there, created=True) if there else None

        with refused_if_too_large():
            result = self._database.write(create, confirm)
        self._creation.announce(result, message)
        return result

    def _existing(self, session: Session, definition: JobDefinition, request: CreateJobInput) -> AiJob | None:
        """The job that this user's key led to before; refused where it was another request's."""
        if not can_have_led_to_a_job(request):
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
            **of_today(definition),
            "prompt_version": terms.prompt_version,
            "output_schema_version": terms.output_schema_version,
        }

    def _check_credential(self, session: Session, user_id: str, terms: Terms) -> None:
        if terms.credential_mode == PLATFORM_KEY:
            return
        if not self._owns_credential(session, user_id, terms.credential_mode, terms.credential_id):
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
        The user's limits don't refuse it.
        """
        return self._retries.retry(self._find(job_id, None), by)
