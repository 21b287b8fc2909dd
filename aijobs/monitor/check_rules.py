"""The rules of the check: each is a query for the jobs that break a promise in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, exists, func, literal, or_, select, union_all
from sqlalchemy.orm import aliased

from aijobs.ai.models import AiUsageLog, CallState
from aijobs.db.clock import Clock
from aijobs.definitions.definition import TIMEOUT_MS
from aijobs.jobs.conditions import FREED, WAITS
from aijobs.jobs.history import WORKER, HistoryType
from aijobs.jobs.models import AiJob, AiJobArtifact, AiJobEvent, JobTombstone
from aijobs.jobs.status import FINAL, OPEN, JobState
from aijobs.outbox.models import OutboxEvent, OutboxEventType, OutboxState
from aijobs.outbox.repository import EVENT_PAUSED
from aijobs.settings import Settings

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
    10: "history records every change, in order, and agrees with the row",
}


SLACK = timedelta(minutes=1)
"""Extra time for a pass that is late or busy."""
SECOND_SLACK = timedelta(seconds=2)
"""The same for passes that run every few seconds."""
BROKER_BACK = timedelta(seconds=15)
"""Maximum pause of a dispatcher after the broker was away."""


@dataclass(frozen=True)
class Bounds:
    """How long things may take before they count as broken. The defaults fit the default settings."""

    lease_lost: timedelta = timedelta(minutes=3)
    """From `lock_until` until a reaper must have taken the lease."""
    undelivered: timedelta = timedelta(minutes=3)
    """From an event's due time or claim until it must be sent; from a job's due time until its message must exist."""
    redrive: timedelta = timedelta(seconds=12)
    """From a missing message or event until it must exist again: above the passes' periods."""
    cancel: timedelta = timedelta(minutes=3)
    """From a cancel request until the job must have ended."""
    open_call: timedelta = timedelta(minutes=15)
    """From a provider call's start until its row must be closed: above the longest attempt."""

    @classmethod
    def from_settings(cls, settings: Settings) -> Bounds:
        """Return the sums of the passes' waits for each step; never less than the defaults."""
        wait, usual = settings.seconds, cls()
        reaped = wait("lease_grace") + wait("reaper")
        # The worker dies, or its code must be abandoned, at the last moment.
        let_go = wait("watcher") + wait("stuck_attempt") + wait("lease") + reaped
        # The first sender dies, and the next one's message is lost.
        sent = wait("handover_delay") + wait("dispatcher") + wait("claim_ttl") + wait("claim_release")
        sent_again = sent + wait("redrive_due") + wait("redrive")
        missed = max(wait("redrive"), wait("dispatcher") + BROKER_BACK)
        longest_attempt = timedelta(milliseconds=TIMEOUT_MS[1])
        return cls(
            lease_lost=max(usual.lease_lost, reaped + SLACK),
            undelivered=max(usual.undelivered, sent_again + SLACK),
            redrive=max(usual.redrive, missed + SECOND_SLACK),
            cancel=max(usual.cancel, let_go + SLACK),
            open_call=max(usual.open_call, longest_attempt + let_go + SLACK),
        )


@dataclass(frozen=True)
class Rule:
    """One way to break a promise, as a query for the ids of the jobs that break it.

    It may return a job more than once: with DISTINCT, SQLite walks an index and reads each row separately, instead of
    the table in its order. If an index leads to broken jobs, the query uses it. If everything must be read, one table
    is read in its own order, and others are read by key in the same order.
    """

    promise: int
    what: str
    broken: Callable[[Clock, Bounds], Select[str]]


_ENQUEUED = exists().where(OutboxEvent.aggregate_id == AiJob.id, OutboxEvent.event_type == OutboxEventType.ENQUEUE)
_FINAL_TYPES = tuple(FINAL)


def _jobs(*where: ColumnElement[bool]) -> Select[str]:
    return select(AiJob.id).where(*where)


def _history(*where: ColumnElement[bool]) -> Select[str]:
    return select(AiJobEvent.job_id).where(*where)


def _followed_by(how: Callable[[Any], ColumnElement[bool]]) -> ColumnElement[bool]:
    """Build the condition that the job's history has another row, related to this one by `how`."""
    other = aliased(AiJobEvent)
    return exists().where(other.job_id == AiJobEvent.job_id, how(other)).correlate(AiJobEvent)


def _any_of(*queries: Select[str]) -> Select[str]:
    """Build the union of queries, each with an index of its own."""
    return select(union_all(*queries).subquery().c.id)


def _no_event(clock: Clock, bounds: Bounds) -> Select[str]:
    return _jobs(~_ENQUEUED)


def _no_job(clock: Clock, bounds: Bounds) -> Select[str]:
    there = exists().where(AiJob.id == OutboxEvent.aggregate_id)
    return select(OutboxEvent.aggregate_id).where(OutboxEvent.event_type == OutboxEventType.ENQUEUE, ~there)


def _changed_after_end(clock: Clock, bounds: Bounds) -> Select[str]:
    return _history(AiJobEvent.type.in_(_FINAL_TYPES), _followed_by(lambda later: later.seq > AiJobEvent.seq))


def _half_ended(clock: Clock, bounds: Bounds) -> Select[str]:
    unfinished = _jobs(AiJob.lifecycle_status.in_(FINAL), AiJob.finished_at.is_(None))
    held = _jobs(AiJob.locked_by > "", AiJob.lifecycle_status.not_in(OPEN))
    going = _jobs(AiJob.lifecycle_status.in_(OPEN), AiJob.finished_at.is_not(None))
    return _any_of(unfinished, held, going)


def _attempts_mixed(clock: Clock, bounds: Bounds) -> Select[str]:
    following = aliased(AiJobEvent)
    return (
        select(AiJobEvent.job_id)
        .join(following, and_(following.job_id == AiJobEvent.job_id, following.seq == AiJobEvent.seq + 1))
        .where(
            or_(
                following.attempt_no < AiJobEvent.attempt_no,
                # An attempt begins with its lock.
                and_(following.attempt_no > AiJobEvent.attempt_no, following.type != HistoryType.LOCKED),
                and_(following.attempt_no == AiJobEvent.attempt_no, following.type == HistoryType.LOCKED),
            )
        )
    )


def _written_by_another(clock: Clock, bounds: Bounds) -> Select[str]:
    def another(written: Any) -> ColumnElement[bool]:
        return and_(
            written.attempt_no == AiJobEvent.attempt_no,
            written.actor == WORKER,
            written.instance != AiJobEvent.instance,
        )

    return _history(AiJobEvent.type == HistoryType.LOCKED, _followed_by(another))


def _artifacts_differ(clock: Clock, bounds: Bounds) -> Select[str]:
    made = (
        select(func.count())
        .select_from(AiJobArtifact)
        .where(AiJobArtifact.job_id == AiJob.id)
        .correlate(AiJob)
        .scalar_subquery()
    )
    promised = case((AiJob.lifecycle_status == JobState.SUCCEEDED, AiJob.artifact_count), else_=literal(0))
    return _jobs(made != promised)


def _unsent(clock: Clock, bounds: Bounds) -> Select[str]:
    return select(OutboxEvent.aggregate_id).where(
        OutboxEvent.event_type == OutboxEventType.ENQUEUE,
        OutboxEvent.status == OutboxState.PENDING,
        OutboxEvent.available_at <= clock.now(-bounds.undelivered),
        ~EVENT_PAUSED,
    )


def _claim_left_lying(clock: Clock, bounds: Bounds) -> Select[str]:
    """Claims are released even if the broker is away, or the queue is paused."""
    return select(OutboxEvent.aggregate_id).where(
        OutboxEvent.event_type == OutboxEventType.ENQUEUE,
        OutboxEvent.status == OutboxState.PROCESSING,
        OutboxEvent.locked_at <= clock.now(-bounds.undelivered),
    )


def _lease_left_lying(clock: Clock, bounds: Bounds) -> Select[str]:
    return _jobs(AiJob.lifecycle_status == JobState.RUNNING, AiJob.lock_until <= clock.now(-bounds.lease_lost))


def _nobody_asks(clock: Clock, bounds: Bounds) -> Select[str]:
    """The job waits for an attempt, and no unsent event asks for it.

    There is one event for each attempt, and those of earlier attempts stay, so the query counts them. The wanted key
    can't be built in SQL if it is a digest.
    """
    asked = (
        select(func.count())
        .select_from(OutboxEvent)
        .where(
            OutboxEvent.aggregate_id == AiJob.id,
            OutboxEvent.event_type == OutboxEventType.ENQUEUE,
            OutboxEvent.status != OutboxState.DEAD,
        )
        .correlate(AiJob)
        .scalar_subquery()
    )
    return _jobs(WAITS, asked <= AiJob.attempt_no)


def _cancel_overruled(clock: Clock, bounds: Bounds) -> Select[str]:
    # No index leads to these. One by state would lead to nearly all rows, one by one.
    other_end = _jobs(
        AiJob.cancel_requested_at.is_not(None), AiJob.lifecycle_status.not_in((*OPEN, JobState.CANCELLED))
    )
    too_slow = _jobs(AiJob.lifecycle_status.in_(OPEN), AiJob.cancel_requested_at <= clock.now(-bounds.cancel))
    return _any_of(other_end, too_slow)


def _cancelled_unasked(clock: Clock, bounds: Bounds) -> Select[str]:
    return _jobs(AiJob.lifecycle_status == JobState.CANCELLED, AiJob.cancel_requested_at.is_(None))


def _bought_again(clock: Clock, bounds: Bounds) -> Select[str]:
    def bought(later: Any) -> ColumnElement[bool]:
        return and_(later.seq > AiJobEvent.seq, later.type.in_((HistoryType.PROVIDER_CALLED, HistoryType.OUTPUT_SAVED)))

    return _history(AiJobEvent.type == HistoryType.OUTPUT_SAVED, _followed_by(bought))


def _bought_again_by_retry(clock: Clock, bounds: Bounds) -> Select[str]:
    parent = aliased(AiJob)
    called = exists().where(AiUsageLog.job_id == AiJob.id)
    versions = ("prompt_version", "input_schema_version", "output_schema_version")
    same = [func.coalesce(getattr(parent, v), "") == func.coalesce(getattr(AiJob, v), "") for v in versions]
    saved = exists().where(parent.id == AiJob.parent_job_id, parent.output_hash.is_not(None), *same).correlate(AiJob)
    return _jobs(AiJob.parent_job_id > "", called, saved)


def _call_without_row(clock: Clock, bounds: Bounds) -> Select[str]:
    rows = select(func.count()).where(AiUsageLog.job_id == AiJobEvent.job_id).correlate(AiJobEvent).scalar_subquery()
    called = _history(AiJobEvent.type == HistoryType.PROVIDER_CALLED)
    return called.group_by(AiJobEvent.job_id).having(func.count() > rows)


def _row_without_call(clock: Clock, bounds: Bounds) -> Select[str]:
    calls = (
        select(func.count())
        .where(AiJobEvent.job_id == AiUsageLog.job_id, AiJobEvent.type == HistoryType.PROVIDER_CALLED)
        .correlate(AiUsageLog)
        .scalar_subquery()
    )
    return select(AiUsageLog.job_id).group_by(AiUsageLog.job_id).having(func.count() > calls)


def _call_left_open(clock: Clock, bounds: Bounds) -> Select[str]:
    return select(AiUsageLog.job_id).where(
        AiUsageLog.state == CallState.STARTED, AiUsageLog.started_at <= clock.now(-bounds.open_call)
    )


def _ran_again_after_deletion(clock: Clock, bounds: Bounds) -> Select[str]:
    """Starts from the tombstones, which are few: each is the key of at most one job."""
    repeating = (
        select(AiJob.id)
        .where(
            AiJob.user_id == JobTombstone.user_id,
            AiJob.job_type == JobTombstone.job_type,
            AiJob.idempotency_key == JobTombstone.idempotency_key,
            AiJob.id != JobTombstone.job_id,
        )
        .correlate(JobTombstone)
        .scalar_subquery()
    )
    found = select(repeating.label("id")).select_from(JobTombstone).subquery()
    return select(found.c.id).where(found.c.id.is_not(None))


def _history_gaps(clock: Clock, bounds: Bounds) -> Select[str]:
    """The history has another number of rows than `event_seq`, or a higher number. Rows are numbered from 1."""
    of_job = AiJobEvent.job_id == AiJob.id
    counted = select(func.count()).where(of_job).correlate(AiJob).scalar_subquery()
    beyond = exists().where(of_job, AiJobEvent.seq > AiJob.event_seq)
    return _jobs(or_(counted != AiJob.event_seq, beyond))


def _history_begins_otherwise(clock: Clock, bounds: Bounds) -> Select[str]:
    return select(AiJobEvent.job_id).where(
        or_(
            and_(AiJobEvent.seq == 1, AiJobEvent.type != HistoryType.CREATED),
            and_(AiJobEvent.seq > 1, AiJobEvent.type == HistoryType.CREATED),
        )
    )


def _history_disagrees(clock: Clock, bounds: Bounds) -> Select[str]:
    last = aliased(AiJobEvent)
    held_types = (
        HistoryType.LOCKED,
        HistoryType.PROVIDER_CALLED,
        HistoryType.OUTPUT_SAVED,
        HistoryType.CANCEL_REQUESTED,
    )
    waiting_types = (
        HistoryType.CREATED,
        HistoryType.RETRY_SCHEDULED,
        HistoryType.RELEASED,
        HistoryType.POSTPONED,
        HistoryType.LEASE_LOST,
        HistoryType.CANCEL_REQUESTED,
    )
    agrees = or_(
        and_(AiJob.lifecycle_status.in_(FINAL), last.type == AiJob.lifecycle_status),
        and_(
            AiJob.lifecycle_status == JobState.QUEUED,
            last.type.in_((HistoryType.CREATED, HistoryType.CANCEL_REQUESTED)),
        ),
        and_(AiJob.lifecycle_status == JobState.RUNNING, AiJob.locked_by.is_not(None), last.type.in_(held_types)),
        and_(FREED, last.type.in_(waiting_types)),
    )
    otherwise = or_(~agrees, last.attempt_no != AiJob.attempt_no)
    return _jobs(exists().where(last.job_id == AiJob.id, last.seq == AiJob.event_seq, otherwise).correlate(AiJob))


def _end_untold(clock: Clock, bounds: Bounds) -> Select[str]:
    told = exists().where(
        OutboxEvent.aggregate_id == AiJob.id,
        OutboxEvent.event_type
        == case(
            # SQLAlchemy knows the SQL type of a plain text only.
            (AiJob.lifecycle_status == JobState.SUCCEEDED, OutboxEventType.COMPLETED.value),
            (AiJob.lifecycle_status == JobState.CANCELLED, OutboxEventType.CANCELLED.value),
            else_=OutboxEventType.FAILED.value,
        ),
    )
    return _jobs(AiJob.lifecycle_status.in_(FINAL), ~told)


UNSENT = Rule(5, "has an event that should have been sent long ago", _unsent)
"""The only rule that a healthy system may break for a while: while the broker is away, or just after a pause."""

RULES = (
    Rule(1, "has no enqueue event", _no_event),
    Rule(1, "has an enqueue event but no row", _no_job),
    Rule(2, "changed after its end", _changed_after_end),
    Rule(2, "is neither ended nor going on", _half_ended),
    Rule(2, "ended without its end event", _end_untold),
    Rule(3, "has history of two attempts mixed", _attempts_mixed),
    Rule(3, "was written to by another than the holder of the attempt", _written_by_another),
    Rule(4, "has another number of artifacts than its projection made", _artifacts_differ),
    UNSENT,
    Rule(5, "has an event that a dispatcher took long ago and left lying", _claim_left_lying),
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
