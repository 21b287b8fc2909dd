"""Retry chains. A retry is a new job, a parent has one child at most, so a chain is a line with one end.

Only the references from child to parent give its order: the clocks of two hosts may disagree.
"""

from __future__ import annotations

from sqlalchemy import exists, select
from sqlalchemy.orm import Session, aliased

from aijobs.jobs.models import AiJob


def newest_of_chain(session: Session, root_id: str) -> AiJob | None:
    """Return the newest job of the chain; None if the chain is gone."""
    child = aliased(AiJob)
    has_child = exists().where(child.parent_job_id == AiJob.id)
    return session.execute(select(AiJob).where(AiJob.root_id == root_id, ~has_child)).scalar()
