"""Retry chains. A retry is a new job, so the newest job of a chain shows whether the work is done."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.jobs.models import AiJob
from aijobs.monitor.views import ChainLink

LONGEST = 1000
"""Maximum jobs that are read for the chains of one page, far more than people retry."""


@dataclass(frozen=True)
class Chain:
    """The jobs of one root, oldest first. A parent has at most one child, so a chain is a line."""

    links: tuple[ChainLink, ...]

    @property
    def newest(self) -> ChainLink:
        return self.links[-1]

    def child_of(self, job_id: str) -> str | None:
        """Return the job whose parent is `job_id`, or None."""
        return next((link.id for link in self.links if link.parent_job_id == job_id), None)


def find_chains(session: Session, root_ids: Collection[str]) -> dict[str, Chain]:
    """Return the chains of these roots by root id, in one statement."""
    if not root_ids:
        return {}
    columns = [getattr(AiJob, field.name) for field in fields(ChainLink)]
    rows = session.execute(select(AiJob.root_id, *columns).where(AiJob.root_id.in_(set(root_ids))).limit(LONGEST))
    by_root: dict[str, list[ChainLink]] = {}
    for row in rows:
        by_root.setdefault(row[0], []).append(ChainLink(*row[1:]))
    return {root_id: Chain(_in_order(links)) for root_id, links in by_root.items()}


def _in_order(links: Sequence[ChainLink]) -> tuple[ChainLink, ...]:
    """Return the links of one chain, oldest first."""
    by_parent = {link.parent_job_id: link for link in links}
    ids = {link.id for link in links}
    # The parent of the first link may be deleted, or not among the links.
    link = next((each for each in links if each.parent_job_id not in ids), None)
    ordered: list[ChainLink] = []
    while link is not None and len(ordered) < len(links):
        ordered.append(link)
        link = by_parent.get(link.id)
    return tuple(ordered)
