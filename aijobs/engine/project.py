"""Stage 4, PROJECT: business rows, artifacts, success and end event in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from aijobs.db.database import Database
from aijobs.db.statements import insert_rows
from aijobs.definitions.projector import Artifact
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.engine.run import Run
from aijobs.errors import JobError
from aijobs.jobs.errors import LifecycleError
from aijobs.jobs.lease import KnownJob
from aijobs.jobs.lifecycle.confirm import ended
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.models import AiJobArtifact
from aijobs.jobs.status import JobState
from aijobs.logs import get_logger

logger = get_logger(__name__)

DUPLICATE_MARK = "{{##duplicate}}"


class Project:
    """Writes the business rows of a validated output and the job's success, or neither."""

    def __init__(self, database: Database, lifecycle: LifecycleRepository, registry: JobDefinitionRegistry) -> None:
        self._database, self._lifecycle, self._registry = database, lifecycle, registry

    def project(self, run: Run) -> KnownJob:
        """Return the succeeded job. `JobError` INTERNAL_PROJECTION or a `LifecycleError` rolls everything back."""
        try:
            return self._project(run)
        except (JobError, LifecycleError):
            raise
        except PoolTimeout as error:
            raise JobError("INTERNAL_DATABASE", "the pool had no connection to spare") from error
        except DBAPIError as error:
            code = "INTERNAL_DATABASE" if error.connection_invalidated else "INTERNAL_PROJECTION"
            raise JobError(code, "the projection's statement failed") from error
        except Exception as error:
            raise JobError("INTERNAL_PROJECTION", "the projector raised") from error

    def _project(self, run: Run) -> KnownJob:
        """Project, and if the rows exist already, look for them in a second transaction.

        A savepoint would cost two round trips for every job, and hardly any meets such a conflict. If a cancel or a
        takeover comes in between, the second transaction is refused.
        """
        try:
            return self._succeed(run, lambda session, output: self._run_projector(session, run, output))
        except IntegrityError as error:
            conflict = error
        return self._succeed(run, lambda session, _output: self._find_recorded(session, run, conflict))

    def _succeed(self, run: Run, artifacts_of: Callable[[Session, Any], Sequence[Artifact]]) -> KnownJob:
        """End the job with these artifacts, in one transaction that has locked its row."""

        def work(session: Session) -> KnownJob:
            row = self._lifecycle.lock_row(session, run.lease)
            count = len(artifacts_of(session, row.validated_output if run.output is None else run.output))
            return self._lifecycle.mark_succeeded(
                run.lease, session, row=row, output=run.output, artifact_count=count, duration_ms=run.stopwatch.ms
            )

        return self._database.write(work, ended(run.lease, JobState.SUCCEEDED))

    def _run_projector(self, session: Session, run: Run, output: Any) -> Sequence[Artifact]:
        """Run the projector and record its artifacts."""
        if run.definition.projector is None:
            return ()
        projector = self._registry.projector(run.definition.projector)
        run.projecting = True
        try:
            artifacts = projector.project(session, run.job, output).artifacts
        finally:
            run.projecting = False
        insert_rows(session, AiJobArtifact, [{"job_id": run.job.id, **artifact._asdict()} for artifact in artifacts])
        return artifacts

    def _find_recorded(self, session: Session, run: Run, conflict: IntegrityError) -> Sequence[Artifact]:
        """Return the artifacts on record, after the projection met rows that existed before."""
        rows = session.execute(
            select(AiJobArtifact).where(AiJobArtifact.job_id == run.job.id).order_by(AiJobArtifact.ordinal)
        ).scalars()
        recorded = [Artifact(row.artifact_type, row.artifact_id, row.ordinal) for row in rows]
        if not recorded:
            raise JobError("INTERNAL_PROJECTION", "a unique conflict, and no artifact of this job") from conflict
        logger.info(f"job.projected {DUPLICATE_MARK}", artifacts=len(recorded), **run.fields())
        return recorded
