"""Read jobs for people: pages, one job, counts. Only `reveal` reads payloads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, load_only

from aijobs.db.clock import Clock
from aijobs.definitions.registry import JobDefinitionRegistry
from aijobs.jobs.models import AiJob, AiJobSnapshot
from aijobs.jobs.status import FINAL, JobState, Phase, phase
from aijobs.monitor.chains import Chain, find_chains
from aijobs.monitor.counts import capped_count
from aijobs.monitor.details import (
    describe_snapshot,
    find_artifacts,
    find_history,
    find_outbox,
    find_queued_at,
    find_usage,
    first_published,
)
from aijobs.monitor.filters import JobFilter
from aijobs.monitor.keyset import Cursors, Keyset, Page
from aijobs.monitor.usage import add_up, find_chain_totals
from aijobs.monitor.views import (
    Count,
    JobDetail,
    JobRow,
    JobView,
    Revealed,
    UsageTotal,
)
from aijobs.outbox.models import OutboxEventType


def _columns(answer: type[JobRow | JobDetail]) -> tuple[str, ...]:
    """Return the fields of an answer that are columns of a job; those with a default are filled in elsewhere."""
    return tuple(each.name for each in fields(answer) if each.default is MISSING and hasattr(AiJob, each.name))


_COPIED, _DETAILED = _columns(JobRow), _columns(JobDetail)


def _only(*names: str) -> Any:
    """Load only these columns. Reading another one is an error, not another statement."""
    return load_only(*(getattr(AiJob, name) for name in names), raiseload=True)


class JobReads:
    """Reads jobs in the caller's session. `find_` may return nothing."""

    def __init__(self, clock: Clock, registry: JobDefinitionRegistry, cursors: Cursors) -> None:
        self._clock, self._registry, self._cursors = clock, registry, cursors

    def find_page(
        self, session: Session, wanted: JobFilter, cursor: str | None, limit: int, *, scope: str
    ) -> Page[JobRow]:
        """Return a page of jobs, newest first, in three statements."""
        keyset = Keyset(scope, (AiJob.created_at, AiJob.id))
        query = keyset.page(
            select(AiJob).options(_only(*_COPIED)).where(*wanted.conditions()), cursor, limit, self._cursors
        )
        found = session.execute(query).scalars().all()
        jobs = found[:limit]
        behind = None
        if len(found) > limit:
            behind = keyset.cursor((jobs[-1].created_at, jobs[-1].id), self._cursors)
        return Page(tuple(self._rows(session, jobs)), behind)

    def find_rows(self, session: Session, job_ids: Collection[str]) -> tuple[JobRow, ...]:
        """Return those of these jobs that exist, in any order, in three statements."""
        if not job_ids:
            return ()
        query = select(AiJob).options(_only(*_COPIED)).where(AiJob.id.in_(job_ids))
        return tuple(self._rows(session, session.execute(query).scalars().all()))

    def find_view_page(
        self, session: Session, wanted: JobFilter, cursor: str | None, limit: int, *, scope: str
    ) -> Page[JobView]:
        """Do the same with each job's artifacts, in four statements."""
        page = self.find_page(session, wanted, cursor, limit, scope=scope)
        made = find_artifacts(session, [job.id for job in page.items if job.artifact_count])
        return Page(tuple(JobView(job, made.get(job.id, ())) for job in page.items), page.next_cursor)

    def find_view(self, session: Session, job_id: str, user_id: str | None = None) -> JobView | None:
        """Return a job with its artifacts; None if there is none, or if it is another user's, by the same statement."""
        query = select(AiJob).options(_only(*_COPIED)).where(AiJob.id == job_id)
        if user_id is not None:
            query = query.where(AiJob.user_id == user_id)
        job = session.execute(query).scalar_one_or_none()
        if job is None:
            return None
        (row,) = self._rows(session, [job])
        made = find_artifacts(session, [job.id]) if job.artifact_count else {}
        return JobView(row, made.get(job.id, ()))

    def find_detail(self, session: Session, job_id: str, *, internal: bool) -> JobDetail | None:
        """Return everything of a job except its content, in eight statements."""
        shown = [name for name in _DETAILED if internal or name != "internal_error_message"]
        query = select(AiJob, self._clock.now()).options(_only(*_COPIED, *shown)).where(AiJob.id == job_id)
        found = session.execute(query).one_or_none()
        if found is None:
            return None
        job, now = found
        outbox = find_outbox(session, job_id)
        chains = find_chains(session, [job.root_id])
        totals = find_chain_totals(session, job.root_id)
        queued_at = first_published([e for e in outbox if e.event_type == OutboxEventType.ENQUEUE])
        columns: dict[str, Any] = {name: getattr(job, name) if name in shown else None for name in _DETAILED}
        return JobDetail(
            job=self._row(job, queued_at, chains.get(job.root_id)),
            **columns,
            snapshot=describe_snapshot(session, job_id),
            artifacts=find_artifacts(session, [job_id]).get(job_id, ()),
            history=find_history(session, job_id),
            outbox=outbox,
            usage=find_usage(session, job_id),
            usage_total=totals.get(job_id, UsageTotal()),
            chain=chains[job.root_id].links if job.root_id in chains else (),
            chain_total=add_up(totals.values()),
            read_at=now,
        )

    def find_revealed(self, session: Session, job_id: str) -> Revealed | None:
        """Return a job's input and output. The caller has checked the right and written the audit row."""
        row = session.execute(
            select(AiJob.validated_output, AiJobSnapshot.content)
            .outerjoin(AiJobSnapshot, AiJobSnapshot.job_id == AiJob.id)
            .where(AiJob.id == job_id)
        ).one_or_none()
        return None if row is None else Revealed(snapshot=row.content, validated_output=row.validated_output)

    def count_by_status(self, session: Session, wanted: JobFilter) -> dict[str, Count]:
        """Return the number of jobs in each state that the filter selects without its own state, in one statement."""
        words = [*JobState]
        columns = []
        for word in words:
            one = replace(wanted, lifecycle_status=word)
            columns.append(capped_count(AiJob, *one.conditions()))
        return dict(zip(words, (Count(n) for n in session.execute(select(*columns)).one()), strict=True))

    # --- rows --------------------------------------------------------------------------------------------------

    def _rows(self, session: Session, jobs: Sequence[AiJob]) -> list[JobRow]:
        if not jobs:
            return []
        chains = find_chains(session, {job.root_id for job in jobs})
        queued_at = find_queued_at(session, [job.id for job in jobs])
        return [self._row(job, queued_at.get(job.id), chains.get(job.root_id)) for job in jobs]

    def _row(self, job: AiJob, queued_at: datetime | None, chain: Chain | None) -> JobRow:
        retried_as = chain.child_of(job.id) if chain else None
        newest = chain.newest if chain and retried_as else job
        return JobRow(
            **{name: getattr(job, name) for name in _COPIED},
            phase=phase(job, queued_at is not None),
            queued_at=queued_at,
            retried_as=retried_as,
            newest_id=newest.id,
            newest_status=newest.lifecycle_status,
            retry_refusal=self._retry_refusal(job, retried_as),
            cancel_refusal=self._cancel_refusal(job),
        )

    def _retry_refusal(self, job: AiJob, retried_as: str | None) -> str | None:
        if job.lifecycle_status not in FINAL:
            return "not_final"
        if job.lifecycle_status == JobState.SUCCEEDED:
            return JobState.SUCCEEDED
        if retried_as is not None:
            return "superseded"
        return "unknown_job_type" if self._registry.find(job.job_type) is None else None

    def _cancel_refusal(self, job: AiJob) -> str | None:
        if job.lifecycle_status in FINAL:
            return "final"
        if job.cancel_requested_at is not None:
            return Phase.CANCEL_REQUESTED
        definition = self._registry.find(job.job_type)
        # A job of an unknown type can be cancelled, because nothing else would end it.
        return "not_cancellable" if definition is not None and not definition.execution.cancellable else None
