"""End jobs: succeeded, failed or cancelled.

A requested cancel wins over every way in which a job could go on or fail: that UPDATE requires that no cancel was
requested, and if it finds no row for that reason, the job ends `cancelled` instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, null
from sqlalchemy.orm import Session

from aijobs.ai.billing.usage import mark_lost
from aijobs.canonical import canonical_hash
from aijobs.db.database import Unit
from aijobs.db.statements import constant, read_rows
from aijobs.jobs.conditions import NO_CANCEL, WAITS
from aijobs.jobs.errors import CancelRequested
from aijobs.jobs.history import SYSTEM, WORKER, HistoryType, note_parameters, record
from aijobs.jobs.lease import HeldJob, JobErrorInfo, KnownJob, Lease
from aijobs.jobs.lifecycle.changes import Note
from aijobs.jobs.lifecycle.confirm import cancelled, ended
from aijobs.jobs.lifecycle.lease import Leases
from aijobs.jobs.lifecycle.statements import FIND_HELD, FREE, HELD, TO_HASH, TO_OUTPUT, locked_of, of
from aijobs.jobs.lifecycle.transition import JOBS, Transition
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import END_EVENTS, FINAL, OPEN, JobState
from aijobs.outbox.models import OutboxEvent


class Ends(Leases):
    """The final states. Each end is announced after its commit."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        artifacts = bindparam("to_artifacts", type_=JOBS.c.artifact_count.type)
        succeeded = self._final(JobState.SUCCEEDED, progress=100, artifact_count=artifacts)
        self._succeed_saved = self._ending(**succeeded)
        self._succeed = self._ending(**succeeded, validated_output=TO_OUTPUT, output_hash=TO_HASH)

    def mark_succeeded(
        self,
        lease: Lease,
        unit: Unit | None = None,
        *,
        job: HeldJob | None = None,
        output: Any = None,
        artifact_count: int = 0,
        duration_ms: int | None = None,
    ) -> KnownJob:
        """End the job `succeeded`, with the number of artifacts that its projection made.

        `output`: the validated output, if it isn't saved yet. `job`: what `lock_job` returned; it spares a read. A
        lease that has run out still succeeds, if no other attempt has the job.
        """
        if job is not None and (job.id, job.attempt_no) != (lease.job_id, lease.attempt_no):
            held = f"attempt {lease.attempt_no} of {lease.job_id}"
            raise ValueError(f"the job is at attempt {job.attempt_no} of {job.id}, and the lease is of {held}")

        def succeed(unit: Unit) -> KnownJob:
            held = job or self._held(unit, lease)
            saved = {} if output is None else {"to_output": output, "to_output_hash": canonical_hash(output)}
            parameters = {
                **saved,
                "to_artifacts": artifact_count,
                **note_parameters(HistoryType.SUCCEEDED, duration_ms=duration_ms),
                **self._outbox.end_parameters(held, JobState.SUCCEEDED, END_EVENTS[JobState.SUCCEEDED]),
            }
            self._run_held(unit, self._succeed_saved if output is None else self._succeed, lease, parameters)
            ended_job = replace(
                held, lifecycle_status=JobState.SUCCEEDED, output_hash=saved.get("to_output_hash", held.output_hash)
            )
            self._announce(unit, ended_job, lease, duration_ms)
            return ended_job

        return succeed(unit) if unit is not None else self._database.transact(succeed, ended(lease, JobState.SUCCEEDED))

    def _ending(self, **values: Any) -> Transition:
        """Build a holder's last change, with its history row and end event, which a requested cancel refuses."""
        return self._held_transition(
            HELD, NO_CANCEL, inserts=((OutboxEvent, "dedupe_key", self._outbox.end_row),), **values
        )

    def _held(self, unit: Unit, lease: Lease) -> HeldJob:
        row = read_rows(unit, FIND_HELD, {**of(lease), "of_event": None}).one_or_none()
        if row is None:
            raise self._refusal(unit, lease)
        return locked_of(row).job

    def mark_failed(
        self,
        lease: Lease,
        error: JobErrorInfo,
        session: Session | None = None,
        *,
        actor: str = WORKER,
        duration_ms: int | None = None,
    ) -> AiJob:
        """End the job `failed` with this error; `cancelled` if a cancel was requested."""
        note = Note(HistoryType.FAILED, actor, error.code, duration_ms)
        values = self._failed(error)
        return self._in(session, lambda s: self._go_on_or_cancel(s, lease, note, **values), ended(lease))

    def mark_cancelled(
        self, job: str | Lease, session: Session | None = None, *, duration_ms: int | None = None
    ) -> AiJob:
        """End a job whose cancel was requested: under its lease, or by id if nobody holds it."""
        if isinstance(job, Lease):
            lease, note = job, Note(HistoryType.CANCELLED, WORKER, duration_ms=duration_ms)
            return self._in(session, lambda s: self._cancel(s, lease, note), ended(lease))
        job_id = job
        return self._in(
            session, lambda s: self._cancel(s, job_id, Note(HistoryType.CANCELLED, SYSTEM), WAITS), cancelled(job_id)
        )

    def request_cancel(self, job_id: str, by: str) -> AiJob:
        """Record a cancel request, once, and end the job at once if no worker holds it.

        A final job is returned as it is. The caller checks that the job's definition allows a cancel.
        """

        def request(session: Session) -> AiJob:
            requested = self._change(
                session,
                job_id,
                and_(AiJob.lifecycle_status.in_(OPEN), NO_CANCEL),
                cancel_requested_at=self._clock.now(),
                cancel_requested_by=by,
            )
            job = self._get(session, job_id)
            if requested:
                record(session, self._clock, job, HistoryType.CANCEL_REQUESTED, actor=by)
            if job.lifecycle_status in FINAL or job.locked_by is not None:
                return job
            self._outbox.mark_asking_published(session, job, job.attempt_no + 1, None)  # Its message was never sent.
            return self._cancel(session, job_id, Note(HistoryType.CANCELLED, by), WAITS)

        return self._database.write(request, cancelled(job_id))

    def _go_on_or_cancel(
        self, session: Session, lease: Lease, note: Note, *where: ColumnElement[bool], **values: Any
    ) -> AiJob:
        """Make a holder's last change, or end the job `cancelled` if that was requested.

        A provider call that is still open is given up as lost. Its caller closes it later, if it learns the result.
        """
        try:
            job = self._change_held(session, lease, note, NO_CANCEL, *where, **values)
        except CancelRequested:
            return self._cancel(
                session, lease, Note(HistoryType.CANCELLED, note.actor, duration_ms=note.duration_ms), *where
            )
        mark_lost(session, self._clock, lease.job_id, lease.attempt_no)
        return job

    def _cancel(self, session: Session, target: str | Lease, note: Note, *where: ColumnElement[bool]) -> AiJob:
        if not self._change(session, target, ~NO_CANCEL, *where, **self._final(JobState.CANCELLED)):
            raise self._refusal(session, target, cancelling=True)
        job_id, lease = (target.job_id, target) if isinstance(target, Lease) else (target, None)
        job = self._get(session, job_id)
        self._record(session, job, note, lease)
        mark_lost(session, self._clock, job_id, job.attempt_no)
        return job

    def _final(self, status: JobState, **values: Any) -> dict[str, Any]:
        """Return the columns of a job that ends."""
        return {
            "lifecycle_status": constant(status),
            "finished_at": self._clock.now(),
            "next_attempt_at": null(),
            **FREE,
            **values,
        }

    def _failed(self, error: JobErrorInfo) -> dict[str, Any]:
        return self._final(
            JobState.FAILED,
            error_code=error.code,
            public_error_message=error.public_message,
            internal_error_message=error.internal_message or None,
        )
