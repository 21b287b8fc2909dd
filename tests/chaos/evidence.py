"""The evidence of a run: the rows of the database, the ledger and the bill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select

from aijobs.ai.models import AiUsageLog, CallState
from aijobs.db.database import Database
from aijobs.jobs.models import AiJob, AiJobArtifact, AiJobEvent
from aijobs.jobs.status import OPEN
from aijobs.learning.models import Flashcard
from aijobs.outbox.models import OutboxEvent, OutboxState
from tests.chaos.ledger import Call, read_calls
from tests.chaos.provider import Billed


@dataclass
class Evidence:
    """Rows by job id, the workers' ledger by usage row, and the server's bill."""

    jobs: dict[str, AiJob]
    history: dict[str, list[AiJobEvent]]
    usage: dict[str, list[AiUsageLog]]
    events: dict[str, list[OutboxEvent]]
    artifacts: dict[str, int]
    business_rows: dict[str, int]
    calls: dict[str, Call]
    bill: list[Billed]

    @property
    def rows(self) -> dict[str, AiUsageLog]:
        """Usage rows by their own id."""
        return {row.id: row for of_job in self.usage.values() for row in of_job}

    def calls_of(self, job_id: str) -> list[Call]:
        """Return the job's provider calls, by attempt."""
        return sorted((c for c in self.calls.values() if c.job_id == job_id), key=lambda call: call.attempt_no)

    def children(self) -> dict[str, AiJob]:
        """Return retries by the id of the job that they retry."""
        return {job.parent_job_id: job for job in self.jobs.values() if job.parent_job_id is not None}


def gather(database: Database, ledger: Path, bill: Callable[[], list[Billed]]) -> Evidence:
    """Read all evidence. The bill is last, so that it contains every call that a row mentions."""
    with database.read() as session:
        jobs = {job.id: job for job in session.execute(select(AiJob).order_by(AiJob.id)).scalars()}
        history = _by_job(session.execute(select(AiJobEvent).order_by(AiJobEvent.job_id, AiJobEvent.seq)).scalars())
        usage = _by_job(session.execute(select(AiUsageLog).order_by(AiUsageLog.id)).scalars())
        events = defaultdict(list)
        for event in session.execute(select(OutboxEvent).order_by(OutboxEvent.id)).scalars():
            events[event.aggregate_id].append(event)
        artifacts = session.execute(select(AiJobArtifact.job_id, func.count()).group_by(AiJobArtifact.job_id))
        cards = session.execute(select(Flashcard.job_id, func.count()).group_by(Flashcard.job_id))
        evidence = Evidence(
            jobs,
            history,
            usage,
            events,
            dict(artifacts.tuples().all()),
            dict(cards.tuples().all()),
            read_calls(ledger),
            [],
        )
    evidence.bill = bill()
    return evidence


def count_open(database: Database) -> dict[str, int]:
    """Return the numbers of open jobs, unsent events and open provider calls, without zeros."""
    with database.read() as session:
        found = {
            "jobs": session.execute(
                select(func.count()).select_from(AiJob).where(AiJob.lifecycle_status.in_(OPEN))
            ).scalar_one(),
            "events": session.execute(
                select(func.count())
                .select_from(OutboxEvent)
                .where(OutboxEvent.status.in_((OutboxState.PENDING, OutboxState.PROCESSING)))
            ).scalar_one(),
            "calls": session.execute(
                select(func.count()).select_from(AiUsageLog).where(AiUsageLog.state == CallState.STARTED)
            ).scalar_one(),
        }
    return {name: count for name, count in found.items() if count}


def find_open_jobs(database: Database, limit: int = 20) -> list[str]:
    """Return some jobs that are open, or have an open call or an unsent event."""
    with database.read() as session:
        jobs = session.execute(select(AiJob.id).where(AiJob.lifecycle_status.in_(OPEN)).limit(limit)).scalars().all()
        calls = session.execute(
            select(AiUsageLog.job_id).where(AiUsageLog.state == CallState.STARTED).limit(limit)
        ).scalars()
        unsent = OutboxEvent.status.in_((OutboxState.PENDING, OutboxState.PROCESSING))
        events = session.execute(select(OutboxEvent.aggregate_id).where(unsent).limit(limit)).scalars()
        return list(dict.fromkeys([*jobs, *calls, *events]))


def _by_job(rows: Iterable[AiJobEvent] | Iterable[AiUsageLog]) -> dict[str, list]:  # type: ignore[type-arg]
    found = defaultdict(list)
    for row in rows:
        found[row.job_id].append(row)
    return found
