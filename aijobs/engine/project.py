"""Stage 4, PROJECT: business rows, artifacts, success and end event in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from aijobs.db.database import Database, session_on
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
            return self._succeed(run, lambda connection, output: self._run_projector(connection, run, output))
        except IntegrityError as error:
            conflict = error
        return self._succeed(run, lambda connection, _output: self._find_recorded(connection, run, conflict))

    def _succeed(self, run: Run, artifacts_of: Callable[[Connection, Any], Sequence[Artifact]]) -> KnownJob:
        """End the job with these artifacts, in one transaction that has locked its row."""

        def work(connection: Connection) -> KnownJob:
            saved = self._lifecycle.lock_row(connection, run.lease).output
            count = len(artifacts_of(connection, saved if run.output is None else run.output))
            return self._lifecycle.mark_succeeded(
                run.lease,
                connection,
                job=run.job,
                output=run.output,
                artifact_count=count,
                duration_ms=run.stopwatch.ms,
            )

        return self._database.transact(work, ended(run.lease, JobState.SUCCEEDED))

    def _run_projector(self, connection: Connection, run: Run, output: Any) -> Sequence[Artifact]:
        """Run the projector and record its artifacts. It works in a session on the connection of the transaction."""
        if run.definition.projector is None:
            return ()
        projector = self._registry.projector(run.definition.projector)
        run.projecting = True
        try:
            with session_on(connection) as session:
                artifacts = projector.project(session, run.job, output).artifacts
        finally:
            run.projecting = False
        insert_rows(connection, AiJobArtifact, [{"job_id": run.job.id, **artifact._asdict()} for artifact in artifacts])
        return artifacts

    def _find_recorded(self, connection: Connection, run: Run, conflict: IntegrityError) -> Sequence[Artifact]:
        """Return the artifacts on record, after the projection met rows that existed before."""
        row = AiJobArtifact
        query = select(row.artifact_type, row.artifact_id, row.ordinal).where(row.job_id == run.job.id)
        recorded = [Artifact(*found) for found in connection.execute(query.order_by(row.ordinal))]
        if not recorded:
            raise JobError("INTERNAL_PROJECTION", "a unique conflict, and no artifact of this job") from conflict
        logger.info(f"job.projected {DUPLICATE_MARK}", artifacts=len(recorded), **run.fields())
        return recorded
