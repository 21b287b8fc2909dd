"""Holds a database against the promises: each rule is one statement that names the jobs which break it.

Runs on a live database at any time: a statement sees one instant, and what is allowed to take a while is given it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from sqlalchemy import ColumnElement, Select, and_, case, exists, func, literal, or_, select
from sqlalchemy.orm import Session, aliased

from aijobs.ai.models import STARTED, AiUsageLog
from aijobs.clock import Stopwatch
from aijobs.db import Clock, Database
from aijobs.errors import BrokerUnavailable
from aijobs.jobs.history import WORKER
from aijobs.jobs.lifecycle import DUE_AT
from aijobs.jobs.models import AiJob, AiJobArtifact, AiJobEvent, JobTombstone, QueuePause
from aijobs.jobs.status import CANCELLED, FINAL, OPEN, QUEUED, RUNNING, SUCCEEDED
from aijobs.outbox.keys import enqueue_key
from aijobs.outbox.models import DEAD, ENQUEUE, PENDING, PROCESSING, PUBLISHED, OutboxEvent
from aijobs.outbox.repository import outgoing
from aijobs.queues.message import OutgoingMessage

PAGE = 500

PROMISES = {
    1: "a job and its enqueue event exist together or not at all",
    2: "a final state never changes",
    3: "only the holder of the current attempt writes",
    4: "a succeeded job has as many artifacts as its projection made, any other none",
    5: "no job that isn't final is out of reach",
    6: "an acknowledged cancel ends as cancelled",
    7: "an answer that was paid for and saved is never bought again",
    8: "each provider call has its usage row",
    9: "one (user, type, key) is one job",
    10: "history tells every change, in order, and agrees with the row",
}


class MissingMessages(Protocol):
    """What the check asks of the broker."""

    def find_missing(self, messages: Sequence[OutgoingMessage]) -> set[str]:
        """The event ids of those messages that the broker does not hold. `BrokerUnavailable`."""
        ...


@dataclass(frozen=True)
class Bounds:
    """How long things may take before they count as broken."""

    lease_lost: timedelta = timedelta(minutes=3)
    """From `lock_until` until a reaper must have taken the lease."""
    undelivered: timedelta = timedelta(minutes=3)
    """From an event's due time until it must have been sent; from a job's due time until its message is there."""
    redrive: timedelta = timedelta(seconds=12)
    """From a message that is missed until it must be there again: above the re-drive's period."""
    cancel: timedelta = timedelta(minutes=3)
    """From a cancel request until the job must have ended."""
    open_call: timedelta = timedelta(minutes=15)
    """From a provider call's start until its row must be closed: above the longest attempt."""


@dataclass(frozen=True)
class Finding:
    """A rule that does not hold: which promise, in what way, and for which jobs (the first few, and how many)."""

    promise: int
    what: str
    job_ids: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Report:
    """What a check found. `broker` says whether the broker could be asked."""

    findings: tuple[Finding, ...]
    rules: int
    jobs: int
    broker: str
    seconds: float

    @property
    def is_sound(self) -> bool:
        return not self.findings


@dataclass(frozen=True)
class Rule:
    """One way in which a promise can be broken, as a query for the ids of the jobs that break it."""

    promise: int
    what: str
    broken: Callable[[Clock, Bounds], Select[str]]


class Check:
    """Runs every rule."""

    def __init__(
        self, database: Database, clock: Clock, broker: MissingMessages | None, bounds: Bounds | None = None
    ) -> None:
        """`broker` None: what the broker holds is not looked at."""
        self._database, self._clock, self._broker = database, clock, broker
        self._bounds = bounds or Bounds()

    def run(self, show: int = 20) -> Report:
        """Every broken promise, with up to `show` job ids each."""
        findings, watch = [], Stopwatch()
        with self._database.read() as session:
            jobs = session.execute(select(func.count()).select_from(AiJob)).scalar_one()
        for rule in RULES:
            with self._database.read() as session:
                query = rule.broken(self._clock, self._bounds)
                broken = list(session.execute(query.distinct().limit(10_001)).scalars())
            if broken:
                findings.append(Finding(rule.promise, rule.what, tuple(broken[:show]), len(broken)))
        lost, broker = self._lost_messages()
        if lost:
            findings.append(Finding(5, LOST_MESSAGE, tuple(lost[:show]), len(lost)))
        return Report(tuple(findings), len(RULES) + 1, jobs, broker, watch.seconds)

    def _lost_messages(self) -> tuple[list[str], str]:
        """Jobs long due whose event went out and whose message is nowhere, though the re-drive had its time.

        A message may be popped while it is looked for, and one that was lost a moment ago is not yet missed by the
        re-drive: what is missing is looked for again, and only what stays so counts.
        """
        if self._broker is None:
            return [], "not asked"
        try:
            missing = self._missing(None)
            if missing:
                time.sleep(self._bounds.redrive.total_seconds())
                missing &= self._missing({job_id for job_id, _ in missing})
        except BrokerUnavailable:
            return [], "away"
        return sorted(job_id for job_id, _ in missing), "asked"

    def _missing(self, among: set[str] | None) -> set[tuple[str, int]]:
        """(job id, attempt) of overdue jobs whose message the broker doesn't hold; of all, or of those `among`."""
        missing: set[tuple[str, int]] = set()
        for jobs in self._overdue(among):
            by_key = {enqueue_key(job, job.attempt_no + 1): job for job in jobs}
            with self._database.read() as session:
                events = self._sent_long_ago(session, list(by_key))
            of_event = {event.id: by_key[event.dedupe_key] for event in events}
            gone = self._asked([outgoing(event, of_event[event.id]) for event in events])
            missing |= {(of_event[event_id].id, of_event[event_id].attempt_no) for event_id in gone}
        return missing

    def _asked(self, messages: Sequence[OutgoingMessage]) -> set[str]:
        return self._broker.find_missing(messages) if self._broker is not None and messages else set()

    def _overdue(self, among: set[str] | None) -> Iterator[Sequence[AiJob]]:
        query = select(AiJob).where(_WAITS, ~_PAUSED, DUE_AT <= self._clock.now(-self._bounds.undelivered))
        if among is not None:
            query = query.where(AiJob.id.in_(among))
        after = ""
        while True:
            with self._database.read() as session:
                page = session.execute(query.where(AiJob.id > after).order_by(AiJob.id).limit(PAGE)).scalars().all()
            if not page:
                return
            after = page[-1].id
            yield page

    def _sent_long_ago(self, session: Session, dedupe_keys: Sequence[str]) -> list[OutboxEvent]:
        long_ago = self._clock.now(-self._bounds.undelivered)
        sent = or_(OutboxEvent.last_sent_at.is_(None), OutboxEvent.last_sent_at <= long_ago)
        return list(
            session.execute(
                select(OutboxEvent).where(
                    OutboxEvent.dedupe_key.in_(dedupe_keys), OutboxEvent.status == PUBLISHED, sent
                )
            ).scalars()
        )


LOST_MESSAGE = "has long been due, and the broker does not hold its message"

_WAITS: ColumnElement[bool] = and_(
    AiJob.lifecycle_status.in_(OPEN), or_(AiJob.lifecycle_status == QUEUED, AiJob.locked_by.is_(None))
)
_PAUSED = exists().where(QueuePause.queue_name == AiJob.queue_name)
_ENQUEUED = exists().where(OutboxEvent.aggregate_id == AiJob.id, OutboxEvent.event_type == ENQUEUE)
_FINAL_TYPES = tuple(FINAL)


def _jobs(*where: ColumnElement[bool]) -> Select[str]:
    return select(AiJob.id).where(*where)


def _no_event(clock: Clock, bounds: Bounds) -> Select[str]:
    return _jobs(~_ENQUEUED)


def _no_job(clock: Clock, bounds: Bounds) -> Select[str]:
    there = exists().where(AiJob.id == OutboxEvent.aggregate_id)
    return select(OutboxEvent.aggregate_id).where(OutboxEvent.event_type == ENQUEUE, ~there)


def _changed_after_end(clock: Clock, bounds: Bounds) -> Select[str]:
    later = aliased(AiJobEvent)
    return (
        select(AiJobEvent.job_id)
        .join(later, and_(later.job_id == AiJobEvent.job_id, later.seq > AiJobEvent.seq))
        .where(AiJobEvent.type.in_(_FINAL_TYPES))
    )


def _half_ended(clock: Clock, bounds: Bounds) -> Select[str]:
    ended = and_(AiJob.lifecycle_status.in_(FINAL), or_(AiJob.finished_at.is_(None), AiJob.locked_by.is_not(None)))
    going = and_(AiJob.lifecycle_status.in_(OPEN), AiJob.finished_at.is_not(None))
    return _jobs(or_(ended, going))


def _attempts_mixed(clock: Clock, bounds: Bounds) -> Select[str]:
    following = aliased(AiJobEvent)
    return (
        select(AiJobEvent.job_id)
        .join(following, and_(following.job_id == AiJobEvent.job_id, following.seq == AiJobEvent.seq + 1))
        .where(
            or_(
                following.attempt_no < AiJobEvent.attempt_no,
                # An attempt begins with its lock.
                and_(following.attempt_no > AiJobEvent.attempt_no, following.type != "locked"),
                and_(following.attempt_no == AiJobEvent.attempt_no, following.type == "locked"),
            )
        )
    )


def _written_by_another(clock: Clock, bounds: Bounds) -> Select[str]:
    lock = aliased(AiJobEvent)
    return (
        select(AiJobEvent.job_id)
        .join(
            lock,
            and_(
                lock.job_id == AiJobEvent.job_id,
                lock.attempt_no == AiJobEvent.attempt_no,
                lock.type == "locked",
            ),
        )
        .where(AiJobEvent.actor == WORKER, AiJobEvent.instance != lock.instance)
    )


def _artifacts_differ(clock: Clock, bounds: Bounds) -> Select[str]:
    made = (
        select(func.count())
        .select_from(AiJobArtifact)
        .where(AiJobArtifact.job_id == AiJob.id)
        .correlate(AiJob)
        .scalar_subquery()
    )
    promised = case((AiJob.lifecycle_status == SUCCEEDED, AiJob.artifact_count), else_=literal(0))
    return _jobs(made != promised)


def _undispatched(clock: Clock, bounds: Bounds) -> Select[str]:
    long_ago = clock.now(-bounds.undelivered)
    paused = exists().where(QueuePause.queue_name == OutboxEvent.queue_name)
    return select(OutboxEvent.aggregate_id).where(
        OutboxEvent.event_type == ENQUEUE,
        ~paused,
        or_(
            and_(OutboxEvent.status == PENDING, OutboxEvent.available_at <= long_ago),
            and_(OutboxEvent.status == PROCESSING, OutboxEvent.locked_at <= long_ago),
        ),
    )


def _lease_left_lying(clock: Clock, bounds: Bounds) -> Select[str]:
    return _jobs(AiJob.lifecycle_status == RUNNING, AiJob.lock_until <= clock.now(-bounds.lease_lost))


def _nobody_asks(clock: Clock, bounds: Bounds) -> Select[str]:
    """Waits for an attempt, and no event that could still be sent asks for one."""
    alive = exists().where(
        OutboxEvent.aggregate_id == AiJob.id, OutboxEvent.event_type == ENQUEUE, OutboxEvent.status != DEAD
    )
    return _jobs(_WAITS, ~alive)


def _cancel_overruled(clock: Clock, bounds: Bounds) -> Select[str]:
    other_end = and_(AiJob.lifecycle_status.in_(FINAL), AiJob.lifecycle_status != CANCELLED)
    too_slow = and_(AiJob.lifecycle_status.in_(OPEN), AiJob.cancel_requested_at <= clock.now(-bounds.cancel))
    return _jobs(AiJob.cancel_requested_at.is_not(None), or_(other_end, too_slow))


def _cancelled_unasked(clock: Clock, bounds: Bounds) -> Select[str]:
    return _jobs(AiJob.lifecycle_status == CANCELLED, AiJob.cancel_requested_at.is_(None))


def _bought_again(clock: Clock, bounds: Bounds) -> Select[str]:
    later = aliased(AiJobEvent)
    return (
        select(AiJobEvent.job_id)
        .join(later, and_(later.job_id == AiJobEvent.job_id, later.seq > AiJobEvent.seq))
        .where(AiJobEvent.type == "output_saved", later.type.in_(("provider_called", "output_saved")))
    )


def _bought_again_by_retry(clock: Clock, bounds: Bounds) -> Select[str]:
    parent = aliased(AiJob)
    called = exists().where(AiUsageLog.job_id == AiJob.id)
    versions = ("prompt_version", "input_schema_version", "output_schema_version")
    same = [func.coalesce(getattr(parent, v), "") == func.coalesce(getattr(AiJob, v), "") for v in versions]
    return (
        select(AiJob.id)
        .join(parent, parent.id == AiJob.parent_job_id)
        .where(parent.output_hash.is_not(None), called, *same)
    )


def _call_without_row(clock: Clock, bounds: Bounds) -> Select[str]:
    return _calls_compared(lambda calls, rows: calls > rows)


def _row_without_call(clock: Clock, bounds: Bounds) -> Select[str]:
    return _calls_compared(lambda calls, rows: calls < rows)


def _calls_compared(differ: Callable[[Any, Any], ColumnElement[bool]]) -> Select[str]:
    calls = (
        select(func.count())
        .select_from(AiJobEvent)
        .where(AiJobEvent.job_id == AiJob.id, AiJobEvent.type == "provider_called")
        .correlate(AiJob)
        .scalar_subquery()
    )
    rows = (
        select(func.count())
        .select_from(AiUsageLog)
        .where(AiUsageLog.job_id == AiJob.id)
        .correlate(AiJob)
        .scalar_subquery()
    )
    return _jobs(differ(calls, rows))


def _call_left_open(clock: Clock, bounds: Bounds) -> Select[str]:
    return select(AiUsageLog.job_id).where(
        AiUsageLog.state == STARTED, AiUsageLog.started_at <= clock.now(-bounds.open_call)
    )


def _ran_again_after_deletion(clock: Clock, bounds: Bounds) -> Select[str]:
    return _jobs(
        exists().where(
            JobTombstone.user_id == AiJob.user_id,
            JobTombstone.job_type == AiJob.job_type,
            JobTombstone.idempotency_key == AiJob.idempotency_key,
            JobTombstone.job_id != AiJob.id,
        )
    )


def _history_gaps(clock: Clock, bounds: Bounds) -> Select[str]:
    counted = (
        select(func.count())
        .select_from(AiJobEvent)
        .where(AiJobEvent.job_id == AiJob.id, AiJobEvent.seq <= AiJob.event_seq)
        .correlate(AiJob)
        .scalar_subquery()
    )
    beyond = exists().where(AiJobEvent.job_id == AiJob.id, AiJobEvent.seq > AiJob.event_seq)
    return _jobs(or_(counted != AiJob.event_seq, beyond))


def _history_begins_otherwise(clock: Clock, bounds: Bounds) -> Select[str]:
    return select(AiJobEvent.job_id).where(
        or_(
            and_(AiJobEvent.seq == 1, AiJobEvent.type != "created"),
            and_(AiJobEvent.seq > 1, AiJobEvent.type == "created"),
        )
    )


def _history_disagrees(clock: Clock, bounds: Bounds) -> Select[str]:
    last = aliased(AiJobEvent)
    held_types = ("locked", "provider_called", "output_saved", "cancel_requested")
    waiting_types = ("created", "retry_scheduled", "released", "lease_lost", "cancel_requested")
    agrees = or_(
        and_(AiJob.lifecycle_status.in_(FINAL), last.type == AiJob.lifecycle_status),
        and_(AiJob.lifecycle_status == QUEUED, last.type.in_(("created", "cancel_requested"))),
        and_(AiJob.lifecycle_status == RUNNING, AiJob.locked_by.is_not(None), last.type.in_(held_types)),
        and_(AiJob.lifecycle_status == RUNNING, AiJob.locked_by.is_(None), last.type.in_(waiting_types)),
    )
    return (
        select(AiJob.id)
        .join(last, and_(last.job_id == AiJob.id, last.seq == AiJob.event_seq))
        .where(or_(~agrees, last.attempt_no != AiJob.attempt_no))
    )


def _end_untold(clock: Clock, bounds: Bounds) -> Select[str]:
    told = exists().where(
        OutboxEvent.aggregate_id == AiJob.id,
        OutboxEvent.event_type
        == case(
            (AiJob.lifecycle_status == SUCCEEDED, "ai.job.completed"),
            (AiJob.lifecycle_status == CANCELLED, "ai.job.cancelled"),
            else_="ai.job.failed",
        ),
    )
    return _jobs(AiJob.lifecycle_status.in_(FINAL), ~told)


RULES = (
    Rule(1, "has no enqueue event", _no_event),
    Rule(1, "has an enqueue event but no row", _no_job),
    Rule(2, "changed after its end", _changed_after_end),
    Rule(2, "is neither ended nor going on", _half_ended),
    Rule(2, "ended without its end event", _end_untold),
    Rule(3, "has history of two attempts mixed", _attempts_mixed),
    Rule(3, "was written to by another than the holder of the attempt", _written_by_another),
    Rule(4, "has another number of artifacts than its projection made", _artifacts_differ),
    Rule(5, "has an event that should have been sent long ago", _undispatched),
    Rule(5, "has a lease that ran out long ago", _lease_left_lying),
    Rule(5, "waits, and nothing asks for its next attempt", _nobody_asks),
    Rule(6, "was asked to cancel and did not end so", _cancel_overruled),
    Rule(6, "is cancelled and nobody asked", _cancelled_unasked),
    Rule(7, "asked the provider again with a saved answer", _bought_again),
    Rule(7, "is a retry that bought what its parent had saved", _bought_again_by_retry),
    Rule(8, "made a provider call that has no usage row", _call_without_row),
    Rule(8, "has a usage row that no call stands for", _row_without_call),
    Rule(8, "has a usage row that was never closed", _call_left_open),
    Rule(9, "repeats a deleted job's key", _ran_again_after_deletion),
    Rule(10, "has gaps in its history", _history_gaps),
    Rule(10, "has a history that begins otherwise than with its creation", _history_begins_otherwise),
    Rule(10, "stands otherwise than its history says", _history_disagrees),
)
