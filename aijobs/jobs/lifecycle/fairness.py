"""Fairness: while other users wait, one user holds at most half of a queue's running slots, and at least one.

The share is of the slots in use, this lock included, so the number of workers needn't be known. An expired lease uses
no slot and counts toward no share. Only users who hold fewer jobs go first, in the ring of user ids, so that no slot
idles and no backlog delays the next user.

The check reads the rows after the lock is written and before it is committed. A user who holds no other job, which is
the common case, costs nothing more. If another user is next, the lock is rolled back. Two workers that lock at the same
moment may exceed the share by one; the next lock corrects it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, FromClause, Row, Subquery, exists, func, select, union_all
from sqlalchemy.orm import aliased

from aijobs.db.clock import Clock
from aijobs.db.database import Unit
from aijobs.db.statements import constant, read_rows
from aijobs.jobs.conditions import DUE_AT, FREED, NO_CANCEL, NO_SUSPECT
from aijobs.jobs.errors import AnotherUserNext
from aijobs.jobs.lease import HeldJob
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import JobState

FEW_DUE = 100
"""Up to this many jobs that are due again are read in the order of their due times. In an outage thousands wait for
their due time, and no lock may step over them. If more are due, the next one is near in the order of users."""


class FairShare:
    """Keeps one user's backlog from delaying other users. Reads in the session of the lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all_held = select(build_holders(clock))
        self._deprioritised: dict[str, float] = {}
        """Users who are last in the order of this process, with the end of that by `time.monotonic`."""
        self._last_chosen: dict[str, str] = {}
        """The last user that fairness chose in this process, by queue. The next choice starts after it in the ring."""

    def deprioritise(self, user_id: str, seconds: float) -> None:
        """For so long, have this process lock the user's jobs only if no other user has one that is due."""
        self._deprioritised[user_id] = time.monotonic() + seconds

    @property
    def has_deprioritised(self) -> bool:
        """Whether any user was deprioritised, and that may not be over."""
        return bool(self._deprioritised)

    def holds_another(self, job: FromClause) -> ColumnElement[bool]:
        """Build the condition that the user of a job, given by its row, holds another job of its queue.

        It reads the live leases, which are no more than the slots.
        """
        other = aliased(AiJob)
        return exists().where(
            other.lifecycle_status == constant(JobState.RUNNING),
            other.lock_until > self._clock.now(),
            other.queue_name == job.c.queue_name,
            other.user_id == job.c.user_id,
            other.id != job.c.id,
        )

    def _find_deprioritised(self) -> set[str]:
        now = time.monotonic()
        for user_id, until in list(self._deprioritised.items()):
            if until <= now:
                self._deprioritised.pop(user_id, None)
        return set(self._deprioritised)

    def check(self, unit: Unit, job: HeldJob, holds_another: bool, job_types: Collection[str] | None) -> None:
        """Raise `AnotherUserNext` if the user of `job` had a fair share without it, and another user, who holds fewer
        jobs, has one that is due. This transaction has locked `job`.

        `holds_another`: what that condition says. `job_types`: types that the worker can run; None means any.
        """
        deprioritised = self._find_deprioritised()
        if job.user_id in deprioritised:
            self._raise_if_another_waits(unit, job, deprioritised, job_types)
            return
        if not holds_another:
            return
        found = read_rows(unit, self._all_held, {})
        holders = {row.holder: row.number for row in found if row.queue_name == job.queue_name}
        mine = holders[job.user_id] = holders.get(job.user_id, 1) - 1
        if not mine:
            return
        if mine < max(1, (sum(holders.values()) + 1) // 2):
            return
        busy = {user for user, number in holders.items() if number >= mine}
        self._raise_if_another_waits(unit, job, busy, job_types)

    def _raise_if_another_waits(
        self, unit: Unit, job: HeldJob, busy: set[str], job_types: Collection[str] | None
    ) -> None:
        """`AnotherUserNext` if a user who isn't `busy` has a job that is due."""
        best = self._next(unit, job.queue_name, self._last_chosen.get(job.queue_name, job.user_id), busy, job_types)
        if best is not None:
            self._last_chosen[job.queue_name] = best.user_id
            raise AnotherUserNext(job.id, best.id)

    def _next(
        self, unit: Unit, queue_name: str, last: str, busy: set[str], job_types: Collection[str] | None
    ) -> Row[Any] | None:
        """Return the best waiting job of the next user after `last` in the ring who isn't `busy`.

        No suspect: it needs a child process, which may be in use, and then nothing would run. Each busy user's backlog
        is stepped over as a whole; there are few of them, because each holds about half of the slots.
        """
        where = [AiJob.queue_name == queue_name, NO_CANCEL, NO_SUSPECT]
        if job_types is not None:
            where.append(AiJob.job_type.in_(job_types))
        again = self._find_due_again(unit, where)
        for after in (last, ""):
            best = self._first(unit, where, again, after)
            while best is not None and best.user_id in busy:
                best = self._first(unit, where, again, best.user_id)
            if best is not None:
                return best
        return None

    def _find_due_again(self, unit: Unit, where: Sequence[ColumnElement[bool]]) -> Sequence[Any] | None:
        """Return all freed jobs that are due; None if there are more than `FEW_DUE`."""
        due = (FREED, AiJob.next_attempt_at <= self._clock.now())
        query = select(*_PLACE).where(*where, *due).order_by(AiJob.next_attempt_at).limit(FEW_DUE + 1)
        found = read_rows(unit, query, {}).all()
        return found if len(found) <= FEW_DUE else None

    def _first(
        self, unit: Unit, where: Sequence[ColumnElement[bool]], again: Sequence[Any] | None, after: str
    ) -> Row[Any] | None:
        """Return the best waiting job of the first user after `after`. `again`: the freed jobs that are due, if few."""
        behind = [*where, AiJob.user_id > after, DUE_AT <= self._clock.now()]
        waiting = _best(AiJob.lifecycle_status == JobState.QUEUED, behind)
        if again is None:
            both = union_all(select(waiting), select(_best(FREED, behind))).subquery()
            return read_rows(unit, select(both).order_by(*both.c).limit(1), {}).one_or_none()
        found = read_rows(unit, select(waiting), {}).one_or_none()
        # Each database compares these columns by bytes, as Python does.
        here = [row for row in again if row.user_id > after]
        return min([*here, found] if found is not None else here, key=tuple, default=None)


_PLACE = (AiJob.user_id, AiJob.priority, AiJob.id)


def build_holders(clock: Clock) -> Subquery:
    """Build the subquery of users with live leases: `queue_name`, `holder`, `number`.

    It counts all live leases, which are no more than the slots, and reads them from the index of leases. An index by
    queue or user would read all jobs that ever were; without the clock, all expired leases.
    """
    return (
        select(AiJob.queue_name, AiJob.user_id.label("holder"), func.count().label("number"))
        .where(AiJob.lifecycle_status == JobState.RUNNING, AiJob.lock_until > clock.now())
        .group_by(AiJob.queue_name, AiJob.user_id)
        .subquery("held")
    )


def _best(state: ColumnElement[bool], where: Sequence[ColumnElement[bool]]) -> Subquery:
    """Build the query for the first waiting row in the order of the index. One state a query: an OR is no index range.

    `locked_by` is null in all rows; it is in the order because PostgreSQL would otherwise sort again.
    """
    order = (AiJob.locked_by, *_PLACE)
    return select(*_PLACE).where(state, AiJob.locked_by.is_(None), *where).order_by(*order).limit(1).subquery()
