"""Invariants that hold after every action: the rules of `Check`, and a small model of each job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import Table, func, literal_column, select, union_all
from sqlalchemy.orm import Session

from aijobs.db.database import Base
from aijobs.definitions.definition import MOST_LOSSES
from aijobs.jobs.lifecycle.release import WORKER_LOST
from aijobs.jobs.status import FINAL, JobState
from aijobs.monitor.check import Check
from aijobs.monitor.check_rules import RULES, Bounds
from aijobs.outbox.keys import enqueue_key
from aijobs.outbox.models import OutboxEventType, OutboxState, QueuePause
from tests.statemachine.world import JOB_DAYS, Broken, World

_AGES = timedelta(days=36_500)
AT_ONCE = Bounds(redrive=timedelta())
"""Report a message that the broker lacks at once: no time passes here between two checks."""
PATIENT = Bounds(lease_lost=_AGES, undelivered=_AGES, cancel=_AGES, open_call=_AGES)
"""Report only what is wrong at any time, nothing that merely takes too long."""

Row = Mapping[str, Any]
MAX_ROUNDS = 60
"""Rounds without faults after which every job must have ended."""


def _all_rules(world: World) -> str:
    """Return every rule of `Check` as one SQL statement, because building the SQL each time would be slow.

    It contains the time of its creation, which doesn't matter: no row is as old as the ages in `PATIENT`.
    """
    rules = [rule.broken(world.clock, PATIENT).distinct().subquery() for rule in RULES]
    statement = union_all(*(select(literal_column(str(n)), *rule.c) for n, rule in enumerate(rules)))
    return str(statement.compile(world.database.engine, compile_kwargs={"literal_binds": True}))


def _table(name: str) -> Table:
    return Base.metadata.tables[name]


@dataclass
class Rows:
    """The rows of the database after one action."""

    jobs: dict[str, Row]
    history: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    artifacts: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    asked: set[str] = field(default_factory=set)
    """Dedupe keys of enqueue events that can still be sent, or were."""
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    cards: Counter[str] = field(default_factory=Counter)
    paused: set[str] = field(default_factory=set)


def _inherited(parent: Row | None) -> int:
    """Return the number of losses that a retry of this job inherits."""
    if parent is None or not parent["lost_count"] + parent["uncharged_losses"]:
        return 0
    return int(parent["lifecycle_status"] == JobState.CANCELLED or parent["error_code"] == WORKER_LOST)


class Invariants:
    """Checks the invariants of a world after each action."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.before = Rows({})
        self._rules = _all_rules(world)
        self._ended: dict[str, tuple[Any, ...]] = {}
        self._locks_at_pause: dict[str, Counter[str]] = {}
        self.lives: set[str] = set()
        """The job type and history of each job, as one text: shows which cases a program covers."""

    def check(self, bounds: Bounds = PATIENT) -> None:
        """Check the current state. Raises Broken."""
        if self.world.violations:
            raise Broken("; ".join(self.world.violations))
        if bounds is not PATIENT:
            self._run_check(bounds)
        now = self._read()
        self._none_vanished(now)
        for job_id, job in now.jobs.items():
            self._agrees(job, now, self.before.jobs.get(job_id))
        self._pauses_hold(now)
        self.before = now

    def _run_check(self, bounds: Bounds) -> None:
        """Run `Check`, which also reads the broker."""
        world = self.world
        report = Check(world.database, world.clock, world.broker, bounds).run()
        if not report.is_sound:
            found = "; ".join(f"{f.promise}: {f.what} {f.job_ids}" for f in report.findings)
            raise Broken(f"the check found: {found}")

    def check_until_all_ended(self) -> None:
        """Run the world without faults until every job has ended. Raises Broken if one doesn't end, or ends wrongly."""
        for number in self.world.heal():
            self.check(AT_ONCE if number > 12 and number % 6 == 0 else PATIENT)
            if all(job["lifecycle_status"] in FINAL for job in self.before.jobs.values()):
                break
            if number > MAX_ROUNDS:
                left = [job_id for job_id, job in self.before.jobs.items() if job["lifecycle_status"] not in FINAL]
                raise Broken(f"these jobs do not end: {left}")
        self.world.advance(3600)
        self.check(AT_ONCE)
        for job_id, history in self.before.history.items():
            kind = self.before.jobs[job_id]["job_type"]
            self.lives.add(" ".join([kind, *(row["type"] for row in history)]))

    # --- reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> Rows:
        with self.world.database.read() as session:
            if broken := session.connection().exec_driver_sql(self._rules).all():
                found = "; ".join(f"{RULES[n].promise}: {RULES[n].what} {job_id}" for n, job_id in broken)
                raise Broken(f"the check found: {found}")
            seen = Rows({row["id"]: row for row in self._rows(session, "ai_jobs")})
            for name, into in (("ai_job_events", seen.history), ("ai_job_artifacts", seen.artifacts)):
                for row in self._rows(session, name):
                    into[row["job_id"]].append(row)
            events = _table("outbox_events").c
            seen.asked = set(
                session.execute(
                    select(events.dedupe_key).where(
                        events.event_type == OutboxEventType.ENQUEUE, events.status != OutboxState.DEAD
                    )
                ).scalars()
            )
            usage, cards = _table("ai_usage_logs").c, _table("flashcards").c
            for job_id, attempt, number in session.execute(
                select(usage.job_id, usage.attempt_no, func.count()).group_by(usage.job_id, usage.attempt_no)
            ):
                seen.calls[job_id, attempt] = number
            for job_id, number in session.execute(select(cards.job_id, func.count()).group_by(cards.job_id)):
                seen.cards[job_id] = number
            seen.paused = set(session.execute(select(QueuePause.queue_name)).scalars())
        return seen

    @staticmethod
    def _rows(session: Session, name: str) -> list[Row]:
        table = _table(name)
        found = session.execute(select(table).order_by(*table.primary_key.columns))
        return [dict(row) for row in found.mappings()]

    # --- comparing -------------------------------------------------------------------------------------------------

    def _none_vanished(self, now: Rows) -> None:
        for job_id in self.world.promised_jobs - now.jobs.keys():
            self._was_old(job_id)
            self.world.promised_jobs.discard(job_id)
        for job_id in self.before.jobs.keys() - now.jobs.keys():
            self._was_old(job_id)
            self.world.gone_at[job_id] = self.world.clock.at
            self._ended.pop(job_id, None)

    def _was_old(self, job_id: str) -> None:
        job = self.before.jobs.get(job_id)
        if job is None or job["lifecycle_status"] not in FINAL:
            raise Broken(f"{job_id} is gone, and had not ended")
        if job["finished_at"] > self.world.clock.at - timedelta(days=JOB_DAYS):
            raise Broken(f"{job_id} is gone before its time")

    def _agrees(self, job: Row, now: Rows, before: Row | None) -> None:
        job_id, status = job["id"], job["lifecycle_status"]
        history, artifacts = now.history[job_id], now.artifacts[job_id]
        self._moved_on(job, before, history)
        self._counts_agree(job, history, now.jobs.get(job["parent_job_id"] or ""))
        if status in FINAL:
            last = (job, history, artifacts, now.cards[job_id])
            if self._ended.setdefault(job_id, last) != last:
                raise Broken(f"{job_id} was {self._ended[job_id][0]} and is {job}")
            if job_id in self.world.promised_cancels and status != "cancelled":
                raise Broken(f"{job_id} was to be cancelled and is {status}")
        elif job["locked_by"] is None and _next_key(job) not in now.asked:
            raise Broken(f"{job_id} waits for attempt {job['attempt_no'] + 1}, and no event asks for it")
        made = len(artifacts) if job["job_type"].startswith("cards") and status == JobState.SUCCEEDED else 0
        if now.cards[job_id] != made:
            raise Broken(f"{job_id} is {status} and left {now.cards[job_id]} cards, {made} were promised")
        self._calls_agree(job_id, now)

    @staticmethod
    def _moved_on(job: Row, before: Row | None, history: list[Row]) -> None:
        if before is None:
            return
        back = (JobState.RUNNING, JobState.QUEUED)
        if (before["lifecycle_status"], job["lifecycle_status"]) == back:
            raise Broken(f"{job['id']} went back to queued")
        for name in ("attempt_no", "event_seq", "retry_count", "lost_count", "uncharged_losses"):
            if job[name] < before[name]:
                raise Broken(f"{job['id']}: {name} fell from {before[name]} to {job[name]}")
        if before["cancel_requested_at"] not in (None, job["cancel_requested_at"]):
            raise Broken(f"{job['id']} lost its cancel request")
        if before["output_hash"] not in (None, job["output_hash"]):
            raise Broken(f"{job['id']} has another saved answer than before")
        if len(history) != job["event_seq"]:
            raise Broken(f"{job['id']} has {len(history)} history rows and counts {job['event_seq']}")

    @staticmethod
    def _counts_agree(job: Row, history: list[Row], parent: Row | None) -> None:
        types = Counter(row["type"] for row in history)
        losses = job["lost_count"] + job["uncharged_losses"]
        counts = {**job, "losses": losses, "own losses": losses - _inherited(parent)}
        for name, event_type in (
            ("attempt_no", "locked"),
            ("retry_count", "retry_scheduled"),
            ("own losses", "lease_lost"),
        ):
            if counts[name] != types[event_type]:
                raise Broken(f"{job['id']}: {name} is {counts[name]}, and the history has {types[event_type]}")
        charged = sum(row["type"] == "lease_lost" and row["error_code"] is not None for row in history)
        if job["lost_count"] != charged:
            raise Broken(f"{job['id']} is charged with {job['lost_count']} losses, and the history with {charged}")
        if job["retry_count"] > job["max_retry_count"]:
            raise Broken(f"{job['id']} was tried again too often")
        if job["lost_count"]:
            raise Broken(f"{job['id']} is charged with a loss, and every process of the model is shared")
        if counts["losses"] > MOST_LOSSES or (job["error_code"] == WORKER_LOST) != (counts["losses"] == MOST_LOSSES):
            raise Broken(f"{job['id']} ended {job['error_code']} after {counts['losses']} losses")
        if types["output_saved"] > 1:
            raise Broken(f"{job['id']} saved two answers")

    def _calls_agree(self, job_id: str, now: Rows) -> None:
        made = Counter(call for call in self.world.ledger.calls if call[0] == job_id)
        for call, number in made.items():
            if now.calls[call] < number:
                raise Broken(f"{call} called the provider {number} times and has {now.calls[call]} usage rows")
            if number > 1:
                raise Broken(f"{call} called the provider {number} times in one attempt")

    def _pauses_hold(self, now: Rows) -> None:
        """Check that no worker locks a job of a paused queue. A dispatcher may end one."""
        for queue in now.paused:
            locks = Counter(
                row["job_id"]
                for job_id, history in now.history.items()
                for row in history
                if now.jobs[job_id]["queue_name"] == queue and row["type"] == "locked" and row["actor"] == "worker"
            )
            if queue in self.before.paused and (more := locks - self._locks_at_pause[queue]):
                raise Broken(f"{list(more)} were taken while {queue} was paused")
            self._locks_at_pause[queue] = locks


class _Keyed:
    def __init__(self, job: Row) -> None:
        self.id, self.job_type, self.user_id = job["id"], job["job_type"], job["user_id"]
        self.idempotency_key = job["idempotency_key"]


def _next_key(job: Row) -> str:
    return enqueue_key(_Keyed(job), job["attempt_no"] + 1)
