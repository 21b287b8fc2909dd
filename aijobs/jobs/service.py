"""The only way to create a job, and what users and operators may do to jobs afterwards.

Internal: users reach it through business services, operators through retry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, Executable, Row, Select, bindparam, literal, select, union_all
from sqlalchemy.orm import Session

from aijobs.db.database import Database, session_on
from aijobs.db.statements import read_all
from aijobs.definitions.definition import PLATFORM_KEY, JobDefinition
from aijobs.definitions.registry import JobDefinitionRegistry, job_type_name
from aijobs.errors import ApiError, InputInvalid
from aijobs.jobs.creation import JobCreation, NewJob, definition_columns
from aijobs.jobs.errors import JobGone
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.models import AiJob, JobTombstone
from aijobs.jobs.requests import (
    CreatedJob,
    CreateJobInput,
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
from aijobs.jobs.status import FINAL, JobState
from aijobs.logs import get_logger, job_fields
from aijobs.outbox.repository import OutboxRepository, outgoing
from aijobs.queues.message import OutgoingMessage
from aijobs.screening.redaction import redact
from aijobs.settings import KeyRing

logger = get_logger(__name__)

Read = Callable[[Executable, Mapping[str, Any]], Sequence[Row[Any]]]
"""Run one SELECT with its parameters and return its rows."""


def _by_key(model: type[AiJob] | type[JobTombstone], job_id: Any, is_deleted: int) -> Select[Any]:
    return select(job_id, model.request_hash, literal(is_deleted)).where(
        model.user_id == bindparam("of_user"),
        model.job_type == bindparam("of_type"),
        model.idempotency_key == bindparam("of_key"),
    )


_BY_KEY = union_all(_by_key(AiJob, AiJob.id, 0), _by_key(JobTombstone, JobTombstone.job_id, 1))
"""The job of a user's key, or what is left of it."""

OwnsCredential = Callable[[Session, str, str, str | None], bool]
"""Return whether a user has a credential of this mode with this id."""


class AiJobService:
    """Creates, cancels and retries jobs. Opens the transactions. Raises `ApiError` if it refuses a request."""

    def __init__(
        self,
        database: Database,
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
        """`withdraw` passes a requested cancel to workers and broker. `unavailable_for` is asked before each creation,
        outside of any transaction.
        """
        self._database, self._registry = database, registry
        self._lifecycle, self._outbox, self._creation = lifecycle, outbox, creation
        self._keys, self._withdraw, self._known_prompt = message_keys, withdraw, known_prompt
        self._unavailable_for, self._owns_credential = unavailable_for, owns_credential
        self._retries = Retries(registry, creation, unavailable_for)

    # --- create ------------------------------------------------------------------------------------------------

    def create_job(self, request: CreateJobInput) -> CreatedJob:
        """Create a job with its snapshot, enqueue event and first history row: all or nothing.

        A key that led to a job for the same request before returns that job, whatever its state, before any other check
        and in any outage. Raises `UnknownJobType`, `InputInvalid`, and `ApiError` IDEMPOTENCY_KEY_REUSED,
        PLATFORM_UNAVAILABLE, TOO_MANY_JOBS, QUOTA_EXCEEDED and PAYLOAD_TOO_LARGE.
        """
        definition = self._registry.get(job_type_name(request.job_type))
        # Before the checks: a request that led to a job once gets it, even if it breaks a newer rule.
        if (job_id := self._existing(self._database.rows, definition, request)) is not None:
            with self._database.read() as session:
                existing = session.get(AiJob, job_id)
            if existing is not None:
                return CreatedJob(existing, created=False)
        check_request(request)
        content = validated_input(definition, request.input)
        terms = agree_terms(definition, request.overrides, self._known_prompt)
        if terms.credential_mode != PLATFORM_KEY:
            with self._database.read() as session:
                # Before the breaker: only the owner may learn its state.
                self._check_credential(session, request.user_id, terms)
        wait = self._unavailable_for(definition, terms.credential_mode, terms.credential_id)
        if wait is not None:
            raise ApiError("PLATFORM_UNAVAILABLE", retry_after=wait)
        redacted = redact(content)

        columns = self._columns(definition, request, terms)

        def find(connection: Connection) -> AiJob | None:
            job_id = self._existing(partial(read_all, connection), definition, request)
            if job_id is None:
                return None
            with session_on(connection) as session:
                return session.get_one(AiJob, job_id)

        def prepare(connection: Connection, job_id: str) -> NewJob:
            if terms.credential_mode != PLATFORM_KEY:
                with session_on(connection) as session:
                    self._check_credential(session, request.user_id, terms)
            return NewJob({"id": job_id, "root_id": job_id, **columns}, definition, redacted)

        return self._creation.create_once(request.user_id, find, prepare)

    def _existing(self, rows: Read, definition: JobDefinition, request: CreateJobInput) -> str | None:
        """Return the id of the job that this user's key led to before. IDEMPOTENCY_KEY_REUSED if that was another
        request.
        """
        if not can_have_led_to_a_job(request):
            return None
        key = {"of_user": request.user_id, "of_type": definition.job_type, "of_key": request.idempotency_key}
        for row in rows(_BY_KEY, key):
            job_id, stored_hash, is_deleted = tuple(row)
            if is_deleted or not is_same_request(request, stored_hash, self._keys):
                reason = "expired" if is_deleted else "other_request"
                raise ApiError("IDEMPOTENCY_KEY_REUSED", {"jobId": job_id, "reason": reason})
            return str(job_id)
        return None

    def _columns(self, definition: JobDefinition, request: CreateJobInput, terms: Terms) -> dict[str, Any]:
        keyed = request.idempotency_key is not None
        return {
            **definition_columns(definition),
            "user_id": request.user_id,
            "target_type": request.target_type,
            "target_id": request.target_id,
            "priority": terms.priority,
            "credential_mode": terms.credential_mode,
            "credential_id": terms.credential_id,
            "idempotency_key": request.idempotency_key,
            "request_hash": request_hash(request, self._keys) if keyed else None,
            "trigger_type": "user",
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
        """Request the cancel of a job, and return the job as it is then. A final job is returned as it is.

        With `user_id`, another user's job is JOB_NOT_FOUND, like no job. JOB_NOT_CANCELLABLE if the definition forbids
        it; with `strict` also for a final job (JOB_ALREADY_CANCELLED for a cancelled one).
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
            raise ApiError(
                "JOB_ALREADY_CANCELLED" if job.lifecycle_status == JobState.CANCELLED else "JOB_NOT_CANCELLABLE"
            )
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
        """Return the message that may be in the broker for a job that no worker holds."""
        if job.locked_by is not None:
            return None
        with self._database.read() as session:
            event = self._outbox.enqueue_event(session, job)
            return outgoing(event, job) if event else None

    # --- retry -------------------------------------------------------------------------------------------------

    def retry(self, job_id: str, by: str) -> CreatedJob:
        """Run a failed or cancelled job again, as a new job; the old row is not changed.

        A repeat returns the same child while that is the newest of the chain and not final. Otherwise JOB_NOT_RETRYABLE
        with a `reason`: not_final, succeeded, superseded, snapshot_expired, input_outdated, credential_gone or
        unknown_job_type. The user's limits don't apply.
        """
        return self._retries.retry(self._find(job_id, None), by)
