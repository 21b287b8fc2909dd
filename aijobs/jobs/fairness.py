"""Whose turn it is: while others wait, one user holds at most half of a queue's running slots, and at least one.

The share is of the slots that are in use once the lock is given, so that nobody has to know how many workers there are.
Only who holds fewer than the asker may be put before him: where all are at their share, nobody waits for nothing. Those
get their turns in the ring of user ids, so that the backlog of one of them doesn't hold up the next.
It is judged by the rows as they are, just before the lock. Two workers that lock in the same instant may pass the share
by one; the next lock sees it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Row, Subquery, and_, func, select, true, union_all
from sqlalchemy.orm import Session, aliased

from aijobs.db import Clock
from aijobs.errors import NotYourTurn
from aijobs.jobs.changes import DUE_AT, NOT_ASKED
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import QUEUED, RUNNING


class FairShare:
    """Keeps one user's backlog from holding up the others. Reads in the session of whoever locks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: dict[str, str] = {}
        """Whom this process put before another last, by queue: the next turn is the next user's."""

    def check(
        self, session: Session, job_id: str, may_run: ColumnElement[bool], job_types: Collection[str] | None
    ) -> None:
        """`NotYourTurn` where the job `may_run`, its user has his share, and another who holds fewer waits.

        `job_types` are those that the asker can run: another's job of a type that he can't would help nobody.
        """
        asked = session.execute(_asked(job_id, may_run)).one_or_none()
        if asked is None or asked.held == 0:
            return  # It can't be taken at all, which the lock itself finds; or the user holds nothing.
        held = self._held(session, asked.queue_name)
        mine = held.get(asked.user_id, 0)
        if mine < max(1, (sum(held.values()) + 1) // 2):
            return
        busy = {user for user, number in held.items() if number >= mine}
        best = self._next(session, asked.queue_name, self._last.get(asked.queue_name, asked.user_id), busy, job_types)
        if best is not None:
            self._last[asked.queue_name] = best.user_id
            raise NotYourTurn(job_id, best.id)

    def _held(self, session: Session, queue_name: str) -> Mapping[str, int]:
        """How many jobs of the queue each user holds."""
        number = func.count().label("number")
        query = select(AiJob.user_id, number).where(_HELD, AiJob.queue_name == queue_name).group_by(AiJob.user_id)
        return {row.user_id: row.number for row in session.execute(query)}

    def _next(
        self, session: Session, queue_name: str, last: str, busy: set[str], job_types: Collection[str] | None
    ) -> Row[Any] | None:
        """The best waiting job of the next user behind `last`, around the ring, who isn't `busy`.

        A backlog is stepped over as a whole, and there are few busy users: each holds about half of the slots.
        """
        for after in (last, ""):
            best = self._first(session, queue_name, after, job_types)
            while best is not None and best.user_id in busy:
                best = self._first(session, queue_name, best.user_id, job_types)
            if best is not None:
                return best
        return None

    def _first(
        self, session: Session, queue_name: str, after: str, job_types: Collection[str] | None
    ) -> Row[Any] | None:
        """The best waiting job of the first user behind `after`."""
        where = [AiJob.queue_name == queue_name, AiJob.user_id > after, DUE_AT <= self._clock.now(), NOT_ASKED]
        if job_types is not None:
            where.append(AiJob.job_type.in_(job_types))
        waiting, freed = _best(QUEUED, true(), where), _best(RUNNING, AiJob.locked_by.is_(None), where)
        both = union_all(select(waiting), select(freed)).subquery()
        return session.execute(select(both).order_by(*both.c).limit(1)).one_or_none()


_HELD = and_(AiJob.lifecycle_status == RUNNING, AiJob.lock_until.is_not(None))


def _asked(job_id: str, may_run: ColumnElement[bool]) -> Any:
    """The job's user and queue, and how many jobs of the queue this user holds; no row where it can't be taken."""
    other = aliased(AiJob)
    held = (
        select(func.count())
        .select_from(other)
        .where(
            other.queue_name == AiJob.queue_name,
            other.lifecycle_status == RUNNING,
            other.user_id == AiJob.user_id,
            other.lock_until.is_not(None),
        )
        .correlate(AiJob)
        .scalar_subquery()
    )
    return select(AiJob.user_id, AiJob.queue_name, held.label("held")).where(AiJob.id == job_id, may_run)


def _best(status: str, free: ColumnElement[bool], where: list[ColumnElement[bool]]) -> Subquery:
    """The first row in the order of the index: one state a query, as an OR of two is no range of it."""
    return (
        select(AiJob.user_id, AiJob.priority, AiJob.id)
        .where(AiJob.lifecycle_status == status, free, *where)
        .order_by(AiJob.user_id, AiJob.priority, AiJob.id)
        .limit(1)
        .subquery()
    )
