"""Whose turn it is: while others wait, one user holds at most half of a queue's running slots, and at least one.

The share is of the slots that are in use once the lock is given, so that nobody has to know how many workers there are.
A lease that ran out uses no slot: it counts toward nobody's share, however many there are.
Only who holds fewer than the asker may be put before him: where all are at their share, nobody waits for nothing. Those
get their turns in the ring of user ids, so that the backlog of one of them doesn't hold up the next.
It is judged by the rows as they are once the lock is written and before it is committed: whoever holds no other job,
which is nearly everybody, is asked nothing more, and where it isn't his turn the lock is rolled back. Two workers that
lock in the same instant may pass the share by one; the next lock sees it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, Subquery, func, select, union_all
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.statements import read_rows
from aijobs.jobs.conditions import DUE_AT, FREED, NO_CANCEL, NO_SUSPECT
from aijobs.jobs.errors import NotYourTurn
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import QUEUED, RUNNING

FEW_DUE = 100
"""So many jobs that are due again are looked at in the order of their due times. In an outage thousands wait for
theirs, and every lock comes by: they aren't stepped over. Where more are due, the next of them is never far in the
order of the turns."""


class FairShare:
    """Keeps one user's backlog from holding up the others. Reads in the session of whoever locks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.holders = build_holders(clock)
        self._all_held = select(self.holders)
        self._behind: dict[str, float] = {}
        """Users whose jobs let the jobs of others go first, and until when by `time.monotonic`."""
        self._last: dict[str, str] = {}
        """Whom this process put before another last, by queue: the next turn is the next user's."""

    def put_behind(self, user_id: str, seconds: float) -> None:
        """For so long, have this process lock the user's jobs only if no other user has one that is due."""
        self._behind[user_id] = time.monotonic() + seconds

    def _users_behind(self) -> set[str]:
        now = time.monotonic()
        for user_id, until in list(self._behind.items()):
            if until <= now:
                self._behind.pop(user_id, None)
        return set(self._behind)

    def check(self, session: Session, job: AiJob, held: int, job_types: Collection[str] | None) -> None:
        """`NotYourTurn` where the user of `job`, which this transaction has just locked, had his share without it, and
        another who holds fewer waits.

        `held` is how many he holds with it (`holders`). `job_types` are those that the asker can run: another's job
        of a type that he can't would help nobody.
        """
        behind = self._users_behind()
        if job.user_id in behind:
            self._let_go_first(session, job, behind, job_types)
            return
        mine = held - 1
        if not mine:
            return
        found = read_rows(session, self._all_held, {})
        holders = {row.holder: row.number for row in found if row.queue_name == job.queue_name}
        holders[job.user_id] = mine
        if mine < max(1, (sum(holders.values()) + 1) // 2):
            return
        busy = {user for user, number in holders.items() if number >= mine}
        self._let_go_first(session, job, busy, job_types)

    def _let_go_first(self, session: Session, job: AiJob, busy: set[str], job_types: Collection[str] | None) -> None:
        """`NotYourTurn` if a user who isn't `busy` has a job that is due."""
        best = self._next(session, job.queue_name, self._last.get(job.queue_name, job.user_id), busy, job_types)
        if best is not None:
            self._last[job.queue_name] = best.user_id
            raise NotYourTurn(job.id, best.id)

    def _next(
        self, session: Session, queue_name: str, last: str, busy: set[str], job_types: Collection[str] | None
    ) -> Row[Any] | None:
        """The best waiting job of the next user behind `last`, around the ring, who isn't `busy`.

        No suspect: it has a place of its own, which may be taken, and then nobody would run.
        A backlog is stepped over as a whole, and there are few busy users: each holds about half of the slots.
        """
        where = [AiJob.queue_name == queue_name, NO_CANCEL, NO_SUSPECT]
        if job_types is not None:
            where.append(AiJob.job_type.in_(job_types))
        again = self._find_due_again(session, where)
        for after in (last, ""):
            best = self._first(session, where, again, after)
            while best is not None and best.user_id in busy:
                best = self._first(session, where, again, best.user_id)
            if best is not None:
                return best
        return None

    def _find_due_again(self, session: Session, where: Sequence[ColumnElement[bool]]) -> Sequence[Any] | None:
        """All freed jobs that are due, where they are few; None where they are many."""
        due = (FREED, AiJob.next_attempt_at <= self._clock.now())
        query = select(*_PLACE).where(*where, *due).order_by(AiJob.next_attempt_at).limit(FEW_DUE + 1)
        found = session.execute(query).all()
        return found if len(found) <= FEW_DUE else None

    def _first(
        self, session: Session, where: Sequence[ColumnElement[bool]], again: Sequence[Any] | None, after: str
    ) -> Row[Any] | None:
        """The best waiting job of the first user behind `after`; `again`: the freed jobs that are due, if few."""
        behind = [*where, AiJob.user_id > after, DUE_AT <= self._clock.now()]
        waiting = _best(AiJob.lifecycle_status == QUEUED, behind)
        if again is None:
            both = union_all(select(waiting), select(_best(FREED, behind))).subquery()
            return session.execute(select(both).order_by(*both.c).limit(1)).one_or_none()
        found = session.execute(select(waiting)).one_or_none()
        # Texts that are compared are ordered by bytes on each database, which is Python's order too.
        here = [row for row in again if row.user_id > after]
        return min([*here, found] if found is not None else here, key=tuple, default=None)


_PLACE = (AiJob.user_id, AiJob.priority, AiJob.id)


def build_holders(clock: Clock) -> Subquery:
    """Each user with live leases in a queue, and how many: `queue_name`, `holder`, `number`.

    All live leases are counted, as there are no more than slots. The index of the leases leads to them alone: one by
    queue or user would lead to all that ever were, and without the clock it would lead to all that ran out.
    """
    return (
        select(AiJob.queue_name, AiJob.user_id.label("holder"), func.count().label("number"))
        .where(AiJob.lifecycle_status == RUNNING, AiJob.lock_until > clock.now())
        .group_by(AiJob.queue_name, AiJob.user_id)
        .subquery("held")
    )


def _best(state: ColumnElement[bool], where: Sequence[ColumnElement[bool]]) -> Subquery:
    """The first waiting row in the order of the index: one state a query, as an OR of two is no range of it.

    `locked_by`, which is null in all of them, is in the order because PostgreSQL else sorts what the index has sorted.
    """
    order = (AiJob.locked_by, *_PLACE)
    return select(*_PLACE).where(state, AiJob.locked_by.is_(None), *where).order_by(*order).limit(1).subquery()
