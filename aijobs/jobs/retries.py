"""An operator's retry: a failed or cancelled job runs again, as a new job that stands in its chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, undefer

from aijobs.canonical import find_faults
from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.definitions.definition import PLATFORM_KEY, JobDefinition
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.errors import ApiError, InputInvalid
from aijobs.ids import new_id
from aijobs.jobs.chains import newest_of_chain
from aijobs.jobs.creation import CreatedJob, JobCreation, of_today, refused_if_too_large
from aijobs.jobs.lifecycle.release import WORKER_LOST
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import UnavailableFor, validated_input
from aijobs.jobs.snapshots import read_snapshot, redacted_content
from aijobs.jobs.status import CANCELLED, FAILED, FINAL
from aijobs.jobs.users import ensure_user_row, lock_user_row
from aijobs.logs import get_logger, job_fields
from aijobs.queues.message import OutgoingMessage
from aijobs.screening.redaction import Redacted, redact

logger = get_logger(__name__)


class Retries:
    """Makes the children of jobs. Raises `ApiError` for what is refused."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        registry: JobDefinitionRegistry,
        creation: JobCreation,
        unavailable_for: UnavailableFor,
    ) -> None:
        self._database, self._clock, self._registry, self._creation = database, clock, registry, creation
        self._unavailable_for = unavailable_for

    def retry(self, parent: AiJob, by: str) -> CreatedJob:
        """The child of `parent`, new or the one that is on its way; see `AiJobService.retry`."""
        message: list[OutgoingMessage] = []
        child_id = new_id()
        wait = self._wait(parent)

        def retry(session: Session) -> CreatedJob:
            message.clear()
            lock_user_row(session, parent.user_id)
            job = session.execute(
                select(AiJob).where(AiJob.id == parent.id).options(undefer(AiJob.validated_output))
            ).scalar()
            if job is None:  # Its retention was over in this very moment.
                raise ApiError("JOB_NOT_FOUND")
            live = self._live_child(session, job)
            if live is not None:
                return CreatedJob(live, created=live.id == child_id)
            definition = self._definition(job)
            child = _child(job, definition, child_id)
            content = _input_again(session, job, definition)
            if wait is not None and child.output_hash is None:
                raise ApiError("PLATFORM_UNAVAILABLE", retry_after=wait)
            inserted = self._creation.insert(session, child, definition, content)
            if inserted is None:
                winner = self._live_child(session, job)
                if winner is None:
                    raise ApiError("SERVICE_BUSY")
                return CreatedJob(winner, created=False)
            message.append(inserted)
            return CreatedJob(child, created=True)

        def confirm(session: Session) -> CreatedJob | None:
            there = session.get(AiJob, child_id)
            return CreatedJob(there, created=True) if there else None

        ensure_user_row(self._database, self._clock, parent.user_id)
        with refused_if_too_large():
            result = self._database.write(retry, confirm)
        logger.info("job.retried", by=by, parentJobId=parent.id, **job_fields(result.job))
        self._creation.announce(result, message)
        return result

    def _wait(self, parent: AiJob) -> timedelta | None:
        """How long nobody would work on a child of this job; a child that inherits an answer needs nobody."""
        definition = self._registry.find(parent.job_type)
        if definition is None:
            return None
        return self._unavailable_for(definition, parent.credential_mode, parent.credential_id)

    def _live_child(self, session: Session, job: AiJob) -> AiJob | None:
        """The job's child where it is the newest of the chain and not final; refused where the chain went on."""
        child = session.execute(select(AiJob).where(AiJob.parent_job_id == job.id)).scalar()
        if child is None:
            return None
        newest = newest_of_chain(session, job.root_id) or child
        if newest.id == child.id and child.lifecycle_status not in FINAL:
            return child
        raise _not_retryable("superseded", newestJobId=newest.id)

    def _definition(self, job: AiJob) -> JobDefinition:
        """The definition that a child of this job runs by; JOB_NOT_RETRYABLE where there can't be one."""
        if job.lifecycle_status not in (FAILED, CANCELLED):
            raise _not_retryable("succeeded" if job.lifecycle_status in FINAL else "not_final")
        definition = self._registry.find(job.job_type)
        if definition is None:
            raise _not_retryable("unknown_job_type")
        if job.credential_mode != PLATFORM_KEY and job.credential_id is None:
            raise _not_retryable("credential_gone")
        return definition


def _child(job: AiJob, definition: JobDefinition, child_id: str) -> AiJob:
    """The new job, with the saved output of the old one where it was made by the same versions."""
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
        uncharged_losses=1 if _is_suspected(job) else 0,
        **of_today(definition),
    )
    same_versions = all(
        getattr(child, version) == getattr(job, version)
        for version in ("prompt_version", "input_schema_version", "output_schema_version")
    )
    if job.output_hash is not None and same_versions:
        child.validated_output, child.output_hash = job.validated_output, job.output_hash
    return child


def _is_suspected(job: AiJob) -> bool:
    """Whether the job's retry may end a worker's process: an attempt that ended with another error has cleared it."""
    return job.is_suspect and (job.lifecycle_status == CANCELLED or job.error_code == WORKER_LOST)


def _input_again(session: Session, job: AiJob, definition: JobDefinition) -> Redacted:
    snapshot = read_snapshot(session, job.id)
    if snapshot is not None:
        redacted = redacted_content(snapshot)
        if snapshot.schema_version == definition.input.schema_version:
            return redacted
        return replace(redacted, content=_input_of_today(definition, redacted.content))
    rebuilt = definition.rebuild(job.target_type, job.target_id) if definition.rebuild else None
    if rebuilt is None:
        raise _not_retryable("snapshot_expired")
    return redact(_input_of_today(definition, rebuilt))


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
