"""The frozen input of a job, and its deletion after its time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import bindparam, delete, select
from sqlalchemy.orm import Session, undefer

from aijobs.canonical import canonical_bytes
from aijobs.db.clock import Clock
from aijobs.db.statements import change_rows, read_rows
from aijobs.jobs.models import AiJob, AiJobSnapshot
from aijobs.jobs.status import FINAL
from aijobs.screening.redaction import VERSION, Redacted, redact


class SnapshotBuilder:
    """Builds snapshots. Their time counts from now."""

    def __init__(self, clock: Clock, keep: timedelta) -> None:
        self._clock, self._keep = clock, keep

    def build(self, job_id: str, schema_version: str, redacted: Redacted) -> dict[str, Any]:
        """Return the snapshot of a new job as a row, to be inserted in the transaction that creates the job.

        Only redacted input is stored or hashed.
        """
        written = canonical_bytes(redacted.content)
        return {
            "job_id": job_id,
            "schema_version": schema_version,
            "content": redacted.content,
            "content_hash": hashlib.sha256(written).hexdigest(),
            "content_bytes": len(written),
            "redaction_version": redacted.version,
            "redaction_counts": dict(redacted.counts),
            "expires_at": self._clock.now(self._keep),
        }


_WHOLE = (
    select(AiJobSnapshot).where(AiJobSnapshot.job_id == bindparam("job_id")).options(undefer(AiJobSnapshot.content))
)
"""A job's snapshot with its content."""
_CONTENT = select(AiJobSnapshot.content).where(AiJobSnapshot.job_id == bindparam("job_id"))


def read_snapshot(session: Session, job_id: str) -> AiJobSnapshot | None:
    """Return the snapshot of a job with its content; None if it has expired."""
    return session.execute(_WHOLE, {"job_id": job_id}).scalar()


def read_content(session: Session, job_id: str) -> Mapping[str, Any] | None:
    """Return a job's input; None if its snapshot has expired."""
    content: Mapping[str, Any] | None = read_rows(session, _CONTENT, {"job_id": job_id}).scalar()
    return content


def redacted_content(snapshot: AiJobSnapshot) -> Redacted:
    """Return a snapshot's content for another job, redacted again if today's rules are newer."""
    if snapshot.redaction_version == VERSION:
        return Redacted(snapshot.content, snapshot.redaction_counts, VERSION)
    return redact(snapshot.content)


def delete_expired(session: Session, clock: Clock, limit: int) -> int:
    """Delete up to `limit` expired snapshots of final jobs, and return their number.

    A job that isn't final keeps its input for as long as it waits.
    """
    ids = list(
        session.execute(
            select(AiJobSnapshot.job_id)
            .join(AiJob, AiJob.id == AiJobSnapshot.job_id)
            .where(AiJobSnapshot.expires_at <= clock.now(), AiJob.lifecycle_status.in_(FINAL))
            .order_by(AiJobSnapshot.expires_at)
            .limit(limit)
        ).scalars()
    )
    change_rows(session, delete(AiJobSnapshot).where(AiJobSnapshot.job_id.in_(ids)))
    return len(ids)
