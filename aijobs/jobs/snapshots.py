"""The input of a job, frozen, and its clean-up once nobody needs it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session, undefer

from aijobs.canonical import canonical_bytes, canonical_hash
from aijobs.db import Clock, change_rows, read_clock
from aijobs.jobs.models import AiJob, AiJobSnapshot
from aijobs.jobs.status import FINAL

REDACTION_VERSION = "r0"
"""The rules that content passed before it was stored: r0 has none."""


class SnapshotBuilder:
    """Makes snapshots; how long they are kept counts from their making."""

    def __init__(self, clock: Clock, keep: timedelta) -> None:
        self._clock, self._keep = clock, keep

    def build(self, session: Session, job_id: str, schema_version: str, content: Mapping[str, Any]) -> AiJobSnapshot:
        """The snapshot of a new job, to be added in the transaction that creates it."""
        return AiJobSnapshot(
            job_id=job_id,
            schema_version=schema_version,
            content=dict(content),
            content_hash=canonical_hash(content),
            content_bytes=len(canonical_bytes(content)),
            redaction_version=REDACTION_VERSION,
            redaction_counts={},
            expires_at=read_clock(session, self._clock) + self._keep,
        )


def read_snapshot(session: Session, job_id: str) -> AiJobSnapshot | None:
    """The snapshot of a job with its content, or None where it has expired."""
    return session.execute(
        select(AiJobSnapshot).where(AiJobSnapshot.job_id == job_id).options(undefer(AiJobSnapshot.content))
    ).scalar()


def delete_expired(session: Session, clock: Clock, limit: int) -> int:
    """Delete up to `limit` expired snapshots of jobs that are final; how many went.

    A job that isn't final keeps its input however long it waits.
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
