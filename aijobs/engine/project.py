"""Stage 4, PROJECT: business rows, artifacts, success and end event in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from aijobs.db import Database, savepoint
from aijobs.definitions.projector import Artifact, ResultProjector
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.engine.run import Run
from aijobs.errors import JobError, LifecycleError
from aijobs.jobs.changes import ended
from aijobs.jobs.lifecycle import LifecycleRepository
from aijobs.jobs.models import AiJob, AiJobArtifact
from aijobs.jobs.status import SUCCEEDED
from aijobs.logs import get_logger

logger = get_logger(__name__)

DUPLICATE_MARK = "{{##duplicate}}"


class Project:
    """Makes a validated output part of the business, and the job succeeded, or neither."""

    def __init__(self, database: Database, lifecycle: LifecycleRepository, registry: JobDefinitionRegistry) -> None:
        self._database, self._lifecycle, self._registry = database, lifecycle, registry

    def project(self, run: Run) -> AiJob:
        """The succeeded job. An error rolls everything back: `JobError` INTERNAL_PROJECTION, or a `LifecycleError`."""

        def commit(session: Session) -> AiJob:
            job = self._lifecycle.lock_row(session, run.claim)
            output = job.validated_output if run.output is None else run.output
            artifacts = self._artifacts(session, run, job, output)
            return self._lifecycle.mark_succeeded(
                run.claim, session, artifact_count=len(artifacts), duration_ms=run.stopwatch.ms
            )

        try:
            return self._database.write(commit, ended(run.claim, SUCCEEDED))
        except (JobError, LifecycleError):
            raise
        except PoolTimeout as error:
            raise JobError("INTERNAL_DATABASE", "the pool had no connection to spare") from error
        except DBAPIError as error:
            code = "INTERNAL_DATABASE" if error.connection_invalidated else "INTERNAL_PROJECTION"
            raise JobError(code, "the projection's statement failed") from error
        except Exception as error:
            raise JobError("INTERNAL_PROJECTION", "the projector raised") from error

    def _artifacts(self, session: Session, run: Run, job: AiJob, output: Any) -> Sequence[Artifact]:
        """Run the projector and note its artifacts; what is on record where it was all there before."""
        if run.definition.projector is None:
            return ()
        projector = self._registry.projector(run.definition.projector)
        try:
            with savepoint(session):
                return self._write(session, run, projector, job, output)
        except IntegrityError as error:
            recorded = self._recorded(session, job.id)
            if not recorded:
                raise JobError("INTERNAL_PROJECTION", "a unique conflict, and no artifact of this job") from error
            logger.info(f"job.projected {DUPLICATE_MARK}", artifacts=len(recorded), **run.fields())
            return recorded

    def _write(
        self, session: Session, run: Run, projector: ResultProjector, job: AiJob, output: Any
    ) -> Sequence[Artifact]:
        run.projecting = True
        try:
            artifacts = projector.project(session, job, output).artifacts
        finally:
            run.projecting = False
        session.add_all(
            AiJobArtifact(job_id=job.id, artifact_type=a.artifact_type, artifact_id=a.artifact_id, ordinal=a.ordinal)
            for a in artifacts
        )
        session.flush()
        return artifacts

    def _recorded(self, session: Session, job_id: str) -> list[Artifact]:
        rows = session.execute(
            select(AiJobArtifact).where(AiJobArtifact.job_id == job_id).order_by(AiJobArtifact.ordinal)
        ).scalars()
        return [Artifact(row.artifact_type, row.artifact_id, row.ordinal) for row in rows]
