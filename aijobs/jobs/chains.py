"""Retry chains. A retry is a new job, a parent has one child at most, so a chain is a line with one end.

Only the references from child to parent give its order: the clocks of two hosts may disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from sqlalchemy import exists, select
from sqlalchemy.orm import Session, aliased

from aijobs.jobs.models import AiJob


class Link(Protocol):
    """What gives the place of a job in its chain."""

    @property
    def id(self) -> str: ...

    @property
    def parent_job_id(self) -> str | None: ...


L = TypeVar("L", bound=Link)


def newest_of_chain(session: Session, root_id: str) -> AiJob | None:
    """Return the newest job of the chain; None if the chain is gone."""
    child = aliased(AiJob)
    has_child = exists().where(child.parent_job_id == AiJob.id)
    return session.execute(select(AiJob).where(AiJob.root_id == root_id, ~has_child)).scalar()


def in_order(links: Sequence[L]) -> tuple[L, ...]:
    """Return the links of one chain, the first one first."""
    by_parent = {link.parent_job_id: link for link in links}
    ids = {link.id for link in links}
    # The parent of the first link may be deleted, or may not have been read.
    link = next((each for each in links if each.parent_job_id not in ids), None)
    ordered: list[L] = []
    while link is not None and len(ordered) < len(links):
        ordered.append(link)
        link = by_parent.get(link.id)
    return tuple(ordered)
