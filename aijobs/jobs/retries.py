"""An operator's retry: a failed or cancelled job runs again, as a new job in the same chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session, undefer

from aijobs.canonical import find_faults
from aijobs.db.database import session_on
from aijobs.definitions.definition import PLATFORM_KEY, JobDefinition
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.errors import ApiError, InputInvalid
from aijobs.jobs.chains import newest_of_chain
from aijobs.jobs.creation import JobCreation, NewJob, definition_columns
from aijobs.jobs.lifecycle.release import WORKER_LOST
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreatedJob, UnavailableFor, validated_input
from aijobs.jobs.snapshots import read_snapshot, redacted_content
from aijobs.jobs.status import FINAL, JobState
from aijobs.logs import get_logger, job_fields
from aijobs.screening.redaction import Redacted, redact

logger = get_logger(__name__)


class Retries:
    """Creates the children of jobs. Raises `ApiError` if it refuses one."""

    def __init__(
        self,
        registry: JobDefinitionRegistry,
        creation: JobCreation,
        unavailable_for: UnavailableFor,
    ) -> None:
        self._registry, self._creation = registry, creation
        self._unavailable_for = unavailable_for

    def retry(self, parent: AiJob, by: str) -> CreatedJob:
        """Return the child of `parent`, new or already on its way; see `AiJobService.retry`."""
        wait = self._wait(parent)

        def read(session: Session) -> AiJob:
            query = select(AiJob).where(AiJob.id == parent.id).options(undefer(AiJob.validated_output))
            job = session.execute(query).scalar()
            if job is None:  # Retention has just deleted it.
                raise ApiError("JOB_NOT_FOUND")
            return job

        def find(connection: Connection) -> AiJob | None:
            with session_on(connection) as session:
                return self._live_child(session, read(session))

        def prepare(connection: Connection, child_id: str) -> NewJob:
            with session_on(connection) as session:
                job = read(session)
                definition = self._definition(job)
                child = _child(job, definition, child_id)
                content = _input_again(session, job, definition)
            if wait is not None and "output_hash" not in child:
                raise ApiError("PLATFORM_UNAVAILABLE", retry_after=wait)
            return NewJob(child, definition, content)

        result = self._creation.create_once(parent.user_id, find, prepare)
        logger.info("job.retried", by=by, parentJobId=parent.id, **job_fields(result.job))
        return result

    def _wait(self, parent: AiJob) -> timedelta | None:
        """Return how long no provider would be available for a child of this job; None if one is."""
        definition = self._registry.find(parent.job_type)
        if definition is None:
            return None
        return self._unavailable_for(definition, parent.credential_mode, parent.credential_id)

    def _live_child(self, session: Session, job: AiJob) -> AiJob | None:
        """Return the job's child if it is the newest of the chain and not final. JOB_NOT_RETRYABLE if it isn't."""
        child = session.execute(select(AiJob).where(AiJob.parent_job_id == job.id)).scalar()
        if child is None:
            return None
        newest = newest_of_chain(session, job.root_id) or child
        if newest.id == child.id and child.lifecycle_status not in FINAL:
            return child
        raise _not_retryable("superseded", newestJobId=newest.id)

    def _definition(self, job: AiJob) -> JobDefinition:
        """Return the definition that a child of this job runs by. JOB_NOT_RETRYABLE if there can be no child."""
        if job.lifecycle_status not in (JobState.FAILED, JobState.CANCELLED):
            raise _not_retryable(JobState.SUCCEEDED if job.lifecycle_status in FINAL else "not_final")
        definition = self._registry.find(job.job_type)
        if definition is None:
            raise _not_retryable("unknown_job_type")
        if job.credential_mode != PLATFORM_KEY and job.credential_id is None:
            raise _not_retryable("credential_gone")
        return definition


def _child(job: AiJob, definition: JobDefinition, child_id: str) -> dict[str, Any]:
    """Return the columns of the new job. It inherits the saved output of the old one if the same versions made it."""
    child = {
        "id": child_id,
        "root_id": job.root_id,
        "parent_job_id": job.id,
        "user_id": job.user_id,
        "target_type": job.target_type,
        "target_id": job.target_id,
        "priority": job.priority,
        "credential_mode": job.credential_mode,
        "credential_id": job.credential_id,
        "trigger_type": "admin",
        "uncharged_losses": 1 if _is_suspected(job) else 0,
        **definition_columns(definition),
    }
    same_versions = all(
        child[version] == getattr(job, version)
        for version in ("prompt_version", "input_schema_version", "output_schema_version")
    )
    if job.output_hash is not None and same_versions:
        child |= {"validated_output": job.validated_output, "output_hash": job.output_hash}
    return child


def _is_suspected(job: AiJob) -> bool:
    """Return whether the job's retry may kill its process. An attempt that ended with another error has cleared it."""
    return job.is_suspect and (job.lifecycle_status == JobState.CANCELLED or job.error_code == WORKER_LOST)


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
    """Return old content in today's schema. JOB_NOT_RETRYABLE if that refuses it: an operator can't correct fields."""
    try:
        if faults := list(find_faults(content)):
            raise InputInvalid(faults)
        return validated_input(definition, content)
    except InputInvalid as refused:
        raise _not_retryable("input_outdated", inputSchemaVersion=definition.input.schema_version) from refused


def _not_retryable(reason: str, **details: Any) -> ApiError:
    return ApiError("JOB_NOT_RETRYABLE", {"reason": reason, **details})
