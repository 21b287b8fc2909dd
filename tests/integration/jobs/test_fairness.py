"""Fairness: one user's backlog delays no other user, and no slot idles while jobs wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from aijobs.ids import new_id
from aijobs.jobs.errors import AnotherUserNext, JobLockConflict
from aijobs.jobs.lease import Lease, lease_of
from aijobs.jobs.lifecycle.fairness import FEW_DUE
from aijobs.jobs.models import AiJob
from tests.support.effort import effort
from tests.support.jobs import BACKGROUND_TYPE, BEGIN, Kit
from tests.support.rows import build_job


def backlog(kit: Kit, user: str, number: int, **changes: Any) -> list[str]:
    """Insert waiting jobs of a user, and return their ids in order."""
    jobs = [build_job(id=new_id(), user_id=user, **changes) for _ in range(number)]
    columns = [c.key for c in AiJob.__table__.columns if c.computed is None]
    zero = {"progress": 0, "event_seq": 0, "retry_count": 0, "lost_count": 0, "attempt_no": 0, "artifact_count": 0}
    rows = [{**zero, **{k: v for k in columns if (v := getattr(job, k)) is not None}} for job in jobs]
    with kit.database.transaction() as session:
        session.execute(insert(AiJob), rows)
    return [job.id for job in jobs]


def take(kit: Kit, job_id: str) -> Lease:
    """Lock a job as a worker does that popped its message, or the one that fairness names instead."""
    try:
        return kit.lock(job_id)
    except AnotherUserNext as refusal:
        return kit.lock(refusal.instead)


def refused(kit: Kit, job_id: str) -> AnotherUserNext:
    with pytest.raises(AnotherUserNext) as caught:
        kit.lock(job_id)
    return caught.value


class Slots:
    """Worker slots of a queue, which take messages in order and run each job for a while."""

    def __init__(self, kit: Kit, number: int, messages: Iterable[str]) -> None:
        self.kit, self.number, self.messages = kit, number, list(messages)
        self.running: list[Lease] = []
        self.order: list[str] = []
        """The users whose jobs were locked, in order."""

    def user(self, lease: Lease) -> str:
        return self.kit.job(lease.job_id).user_id

    def fill(self) -> None:
        while self.messages and len(self.running) < self.number:
            try:
                lease = take(self.kit, self.messages[0])
            except JobLockConflict:
                self.messages.pop(0)  # It ran instead of another job before.
                continue
            if lease.job_id == self.messages[0]:
                self.messages.pop(0)
            self.running.append(lease)
            self.order.append(self.user(lease))

    def finish(self) -> None:
        """End the job that has run longest."""
        self.kit.lifecycle.mark_succeeded(self.running.pop(0))

    def held(self) -> Counter[str]:
        return Counter(self.user(lease) for lease in self.running)


# --- the rule ------------------------------------------------------------------------------------------------------


def test_user_without_competitors_has_every_slot(kit: Kit) -> None:
    slots = Slots(kit, 5, backlog(kit, "a", 6))
    slots.fill()
    assert slots.held() == {"a": 5}


def test_backlog_of_a_thousand_jobs_does_not_delay_another_user(kit: Kit) -> None:
    slots = Slots(kit, 4, backlog(kit, "a", 1000))
    slots.fill()
    slots.messages += backlog(kit, "b", 3)
    for _ in range(3):
        slots.finish()
        slots.fill()
        assert len(slots.running) == 4, "no slot idles"
    assert slots.order[4:] == ["b", "b", "a"], "half of the slots, although a thousand messages came first"
    slots.messages = slots.messages[:20] + slots.messages[-3:]
    while slots.running:
        slots.finish()
        slots.fill()
    assert slots.order.count("b") == 3
    assert not slots.messages


def test_user_holds_at_most_half_of_the_slots_while_others_wait(kit: Kit) -> None:
    a = backlog(kit, "a", 9)
    backlog(kit, "b", 9)
    held: Counter[str] = Counter()
    for job_id in a:
        lease = take(kit, job_id)
        held[kit.job(lease.job_id).user_id] += 1
        assert held["a"] - held["b"] <= 1
    assert held == {"a": 5, "b": 4}


def test_one_slot_serves_messages_in_their_order(kit: Kit) -> None:
    slots = Slots(kit, 1, backlog(kit, "a", 3) + backlog(kit, "b", 1))
    while slots.messages or slots.running:
        slots.fill()
        slots.finish()
    assert slots.order == ["a", "a", "a", "b"]


def test_no_slot_idles_if_all_waiting_users_hold_their_share(kit: Kit) -> None:
    a, b = backlog(kit, "a", 3), backlog(kit, "b", 3)
    kit.lock(a[0])
    kit.lock(b[0])
    assert refused_or_none(kit, a[1]) is None, "b holds as many as a"
    assert refused(kit, a[2]).instead == b[1]


def refused_or_none(kit: Kit, job_id: str) -> str | None:
    try:
        kit.lock(job_id)
    except AnotherUserNext as refusal:
        return refusal.instead
    return None


def test_users_are_next_in_the_order_of_the_ring(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    users = ["b", "c", "d", "Ω"]
    slots = Slots(kit, 2, backlog(kit, "a", 200))
    for user in users:
        backlog(kit, user, 50)
    slots.fill()
    for _ in range(40):
        slots.finish()
        slots.fill()
    others = [user for user in slots.order if user != "a"]
    assert len(others) >= 20
    assert others[:8] == users * 2, "in the order of the ring, with any backlog"


# --- waiting jobs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "waiting",
    [
        {"queue_name": "ai-background"},
        {"lifecycle_status": "running", "attempt_no": 1, "next_attempt_at": BEGIN + timedelta(seconds=1)},
        {"lifecycle_status": "running", "attempt_no": 1, "cancel_requested_at": BEGIN},
        {"created_at": BEGIN + timedelta(seconds=1)},
        {"lifecycle_status": "failed", "finished_at": BEGIN},
        {"job_type": "unheard_of"},
    ],
    ids=" ".join,
)
def test_job_that_cannot_be_locked_now_is_never_next(kit: Kit, waiting: dict[str, Any]) -> None:
    a = backlog(kit, "a", 2)
    backlog(kit, "b", 1, **waiting)
    kit.lock(a[0])
    kit.lifecycle.lock_job(a[1], "worker-1", ["synthetic"])


def test_job_that_cannot_be_locked_lets_no_other_job_run_instead(kit: Kit) -> None:
    a = backlog(kit, "a", 2)
    backlog(kit, "b", 1)
    kit.lock(a[0])
    with pytest.raises(JobLockConflict) as caught:
        kit.lock(a[0])
    assert not isinstance(caught.value, AnotherUserNext), "a message that comes twice lets no other job run"
    kit.pause("ai-interactive")
    with pytest.raises(JobLockConflict) as caught:
        kit.lock(a[1])
    assert not isinstance(caught.value, AnotherUserNext)


def test_next_job_is_the_best_of_its_user_retries_included(kit: Kit) -> None:
    a = backlog(kit, "a", 2)
    later = backlog(kit, "b", 2, priority=60)
    urgent = backlog(kit, "b", 2, priority=10)
    kit.lock(a[0])
    assert refused(kit, a[1]).instead == urgent[0]
    again = backlog(kit, "b", 1, priority=5, lifecycle_status="running", attempt_no=1, next_attempt_at=BEGIN)
    assert refused(kit, a[1]).instead == again[0]
    assert kit.job(later[0]).lifecycle_status == "queued"


def test_refusal_for_fairness_writes_nothing(kit: Kit) -> None:
    a = backlog(kit, "a", 2)
    backlog(kit, "b", 1)
    kit.lock(a[0])
    before = kit.everything()
    refused(kit, a[1])
    assert kit.everything() == before


def test_each_queue_has_its_own_shares(kit: Kit) -> None:
    a = backlog(kit, "a", 1)
    there = backlog(kit, "a", 1, queue_name="ai-background", job_type=BACKGROUND_TYPE)
    backlog(kit, "b", 1)
    backlog(kit, "b", 1, queue_name="ai-background", job_type=BACKGROUND_TYPE)
    kit.lock(a[0])
    assert kit.lock(there[0]).attempt_no == 1


def test_job_that_runs_instead_has_its_event_marked_published(kit: Kit) -> None:
    first, second = kit.new_job(user_id="a"), kit.new_job(user_id="a")
    other = kit.new_job(user_id="b")
    kit.lock(first.id)
    assert lease_of(kit.job(take(kit, second.id).job_id)).job_id == other.id
    assert [event.status for event in kit.events(other.id)] == ["published"]
    assert [event.status for event in kit.events(second.id)] == ["pending"]


def test_lock_does_not_read_jobs_that_are_not_due(sqlite_kit: Kit) -> None:
    """In an outage thousands of jobs wait for their due time, and each lock must skip them."""
    kit = sqlite_kit
    a = backlog(kit, "a", 2)
    kit.lock(a[0])

    def lock() -> None:
        assert refused(kit, a[1]).instead == b

    (b,) = backlog(kit, "b", 1)
    before = effort(kit.database.engine, lock)
    later = {"lifecycle_status": "running", "attempt_no": 1, "next_attempt_at": BEGIN + timedelta(minutes=5)}
    for number in range(100):
        backlog(kit, f"c{number:03}", 20, **later)
    backlog(kit, "a", 2000, **later)
    assert effort(kit.database.engine, lock) < 3 * before


def test_lock_of_a_second_job_reads_no_waiting_jobs(kit: Kit) -> None:
    """An index that begins with the queue or the user would also read all jobs that wait for a retry."""
    first, *rest = backlog(kit, "a", 8)
    kit.lock(first)
    backlog(kit, "b", 20, lifecycle_status="succeeded", attempt_no=1)
    learn = kit.analyze if kit.database.engine.dialect.name != "sqlite" else str  # SQLite never analyzes by itself.
    learn("ai_jobs")

    def lock() -> None:
        kit.lifecycle.release(kit.lock(rest.pop()))

    before = efforts(kit, lock)
    backlog(kit, "a", 4000, lifecycle_status="running", attempt_no=1, next_attempt_at=BEGIN + timedelta(minutes=5))
    learn("ai_jobs")
    assert efforts(kit, lock) < 3 * before


EXPIRED = {
    "lifecycle_status": "running",
    "attempt_no": 1,
    "locked_by": "host~boot~1~1~1~dead/token",
    "locked_at": BEGIN - timedelta(hours=1),
    "lock_until": BEGIN - timedelta(minutes=59),
}
"""A job whose worker was lost, and whose lease nobody has taken."""


def test_expired_leases_count_toward_no_share(kit: Kit) -> None:
    backlog(kit, "a", 5, **EXPIRED)
    backlog(kit, "b", 2, **EXPIRED)
    a = backlog(kit, "a", 2)
    (b,) = backlog(kit, "b", 1)
    kit.lock(a[0])
    assert refused(kit, a[1]).instead == b, "b has no live lease"


def test_lock_reads_no_expired_leases(kit: Kit) -> None:
    """Each lock counts the live leases. Of a million expired ones it must read none."""
    mine = backlog(kit, "a", 20)
    (other,) = backlog(kit, "b", 1)
    kit.lock(mine.pop())
    learn = kit.analyze if kit.database.engine.dialect.name != "sqlite" else str  # SQLite never analyzes by itself.
    learn("ai_jobs")

    def lock_alone() -> None:
        kit.lifecycle.release(kit.lock(other))

    def lock_and_find_another() -> None:
        refused(kit, mine[-1])

    works = (lock_alone, lock_and_find_another)
    before = [efforts(kit, work) for work in works]
    many = {"lifecycle_status": "running", "attempt_no": 1, "next_attempt_at": BEGIN - timedelta(minutes=1)}
    backlog(kit, "z", FEW_DUE + 1, **many)
    again = efforts(kit, lock_and_find_another)
    for user in ("a", "b", "c"):
        backlog(kit, user, 1000, **EXPIRED)
    learn("ai_jobs")
    for work, limit in zip(works, (before[0], max(before[1], again)), strict=True):
        assert efforts(kit, work) < 2 * limit, work.__name__


def efforts(kit: Kit, work: Callable[[], None]) -> int:
    """Return the least of three measurements, because a server also does work of its own."""
    return min(effort(kit.database.engine, work) for _ in range(3))


def test_many_jobs_due_again_are_next_in_the_order_of_the_ring(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    due = {"lifecycle_status": "running", "attempt_no": 1}
    a = backlog(kit, "a", 2)
    kit.lock(a[0])
    for user in ("b", "c"):
        backlog(kit, user, FEW_DUE, **due, next_attempt_at=BEGIN - timedelta(minutes=1))
    (d,) = backlog(kit, "d", 1, **due, next_attempt_at=BEGIN)
    following = [refused(kit, a[1]).instead for _ in range(4)]
    assert [kit.job(job_id).user_id for job_id in following] == ["b", "c", "d", "b"]
    assert following[2] == d, "although many jobs were due before it"


def test_backlog_is_skipped_by_the_index(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    a = backlog(kit, "a", 400)
    b = backlog(kit, "b", 1)
    kit.lock(a[0])
    with kit.statements() as seen:
        assert refused(kit, a[1]).instead == b[0]
    assert any("ix_ai_jobs_due (queue_name=? AND lifecycle_status=?" in line for line in plan(kit, seen[-2]))
    assert any(RING_INDEX in line for line in plan(kit, seen[-1]))
    assert len([statement for statement in seen if not statement.startswith("BEGIN")]) == 9, (
        "two for the message, four for the lock, three for fairness"
    )
    backlog(kit, "b", FEW_DUE + 1, lifecycle_status="running", attempt_no=1, next_attempt_at=BEGIN)
    with kit.statements() as seen:
        refused(kit, a[1])
    search = next(statement for statement in seen if "UNION ALL" in statement)
    assert sum(RING_INDEX in line for line in plan(kit, search)) == 2


RING_INDEX = "ix_ai_jobs_turns (queue_name=? AND lifecycle_status=? AND locked_by=? AND user_id>?)"


def plan(kit: Kit, search: str) -> list[str]:
    with kit.database.engine.connect() as connection:
        values = tuple("x" for _ in range(search.count("?")))
        return [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {search}", values)]
