"""Moves due outbox events to where they go: claim first, then send, then mark.

Any number of dispatchers may run at once: every step is a compare-and-set, and a mark names the claim it belongs to.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import Protocol

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.db.database import Database
from aijobs.errors import BrokerUnavailable
from aijobs.jobs.errors import JobLockConflict
from aijobs.jobs.lease import JobErrorInfo
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.jobs.models import AiJob
from aijobs.logs import Outage, fault, get_logger, job_fields, where
from aijobs.outbox.keys import enqueue_key
from aijobs.outbox.models import END_EVENTS, ENQUEUE, OutboxEvent
from aijobs.outbox.repository import MAX_ATTEMPTS, OutboxRepository, outgoing
from aijobs.queues.message import HandOver, OutgoingMessage
from aijobs.queues.state import REFUSED

logger = get_logger(__name__)

UNKNOWN_EVENT_TYPE = "UNKNOWN_EVENT_TYPE"
NOT_DISPATCHED = "INTERNAL_NOT_DISPATCHED"
FRESH_S, TRIED_S = 4.0, 1.0
"""How long a cycle takes up fresh events, and those that were tried before. Where jobs come as fast as they go, fresh
ones never end: the others would starve, and the cycle would neither be put on record nor end within the ten seconds
that a process that stops waits for it."""


class Broker(Protocol):
    """What the passes need of the broker. `send` and `find_missing` raise `BrokerUnavailable` if it is away, or if it
    refuses a queue: callers ask for one queue at a time, to know which.
    """

    def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
        """Add messages that are not there yet; what went wrong with single ones, by event id."""
        ...

    def find_missing(self, messages: Sequence[OutgoingMessage]) -> set[str]:
        """The event ids of those messages that the broker does not hold."""
        ...

    def remove(self, message: OutgoingMessage) -> bool:
        """Take a waiting message out; whether it was there. A courtesy that doesn't raise."""
        ...


class OutboxDispatcher:
    """One dispatcher of one process; `instance_id` goes into the claims it makes."""

    def __init__(
        self,
        database: Database,
        outbox: OutboxRepository,
        lifecycle: LifecycleRepository,
        broker: Broker,
        instance_id: str,
        *,
        batch: int = 100,
        claim_ttl: timedelta = timedelta(seconds=60),
        fresh_s: float = FRESH_S,
        tried_s: float = TRIED_S,
    ) -> None:
        self._database, self._outbox, self._lifecycle, self._broker = database, outbox, lifecycle, broker
        self._instance_id, self._batch, self._claim_ttl = instance_id, batch, claim_ttl
        self._fresh_s, self._tried_s = fresh_s, tried_s
        self._outage = Outage(logger, "dispatcher.broker")
        self._backoff = Backoff()
        self._queues: dict[str, _Queue] = {}

    def cycle(self) -> int:
        """Dispatch what is due until nothing is left, or for some seconds; how many events were handled.

        Fresh events go in batches. One that has used up an attempt goes alone, so that an event which kills its
        dispatcher takes no other with it. While the broker is away, cycles do nothing until the wait is over; while it
        refuses one queue, the events of that queue wait and the others are sent.
        """
        if not self._backoff.is_over:
            return 0
        handled = 0
        try:
            for count in chain(self._dispatch(self._fresh_s, tried=False), self._dispatch(self._tried_s, tried=True)):
                handled += count
        except BrokerUnavailable as error:
            self._outage.failed(error)
            self._backoff.lengthen()
        return handled

    def release_expired_claims(self) -> int:
        """Put claims whose dispatcher died back, or end those whose attempts are used up; how many."""
        released = 0
        after: tuple[datetime, str] | None = None
        while True:
            with self._database.read() as session:
                expired = self._outbox.find_expired_claims(session, self._claim_ttl, self._batch, after)
            if not expired or (last := expired[-1]).locked_at is None:
                return released
            after = (last.locked_at, last.id)
            for event in expired:
                released += self._alone(event, partial(self._release, event))

    # --- one claim ---------------------------------------------------------------------------------------------

    def _dispatch(self, seconds: float, *, tried: bool) -> Iterator[int]:
        """Lease and deliver due events until none is left or the time is up; how many, of each claim that got any.

        A page that another dispatcher is just claiming is passed over, and what then moves up into its place: one that
        stands still in the middle of its claim holds up none of those behind. To look for tried events reads all of a
        backlog, and so it is done once a page.
        """
        until = time.monotonic() + seconds
        passed = 0
        while True:
            refused = self._refused_queues()
            with self._database.read() as session:
                ids = self._outbox.find_dispatchable(session, self._batch, tried=tried, skip=passed, without=refused)
            if not ids:
                return
            passed += len(ids)
            claims = [[one] for one in ids] if tried else [ids]
            for event_ids in claims:
                if count := self._claim_and_deliver(event_ids):
                    passed = 0
                    yield count
                if time.monotonic() >= until:
                    return
                if self._refused_queues() != refused:  # The rest of the page may be of a queue that is refused.
                    passed = 0
                    break

    def _refused_queues(self) -> list[str]:
        return [name for name, queue in self._queues.items() if not queue.backoff.is_over]

    def _claim_and_deliver(self, event_ids: Sequence[str]) -> int:
        """Those of the events that are still to be had, and whose queue isn't refused; how many."""
        holder = f"{self._instance_id}/{secrets.token_hex(8)}"
        events = self._database.write(lambda s: self._outbox.claim(s, event_ids, holder))
        if not events:
            return 0
        with self._database.read() as session:
            ids = {event.aggregate_id for event in events}
            jobs = {job.id: job for job in session.execute(select(AiJob).where(AiJob.id.in_(ids))).scalars()}
        return len(events) - self._deliver(events, jobs, holder)

    def _deliver(self, events: Sequence[OutboxEvent], jobs: Mapping[str, AiJob], holder: str) -> int:
        """How many were given back, as the broker refuses their queue."""
        enqueues = [e for e in events if e.event_type == ENQUEUE and e.aggregate_id in jobs]
        unknown = [e for e in events if e.event_type not in (ENQUEUE, *END_EVENTS.values())]
        rest = [e for e in events if e not in enqueues and e not in unknown]
        if unknown:
            self._set_aside(unknown, holder)
        if rest:
            self._publish(rest, holder, sent=False)
        return self._send(enqueues, jobs, holder)

    def _send(self, events: Sequence[OutboxEvent], jobs: Mapping[str, AiJob], holder: str) -> int:
        """Each queue's events in a sending of their own; how many were given back."""
        waiting: dict[str, list[OutboxEvent]] = {}
        for event in events:
            waiting.setdefault(jobs[event.aggregate_id].queue_name, []).append(event)
        given_back = 0
        while waiting:
            queue_name, of_queue = waiting.popitem()
            try:
                self._send_to(queue_name, of_queue, jobs, holder)
            except BrokerUnavailable as error:
                # Not the events' failure: the claim and its count are given back, and the queue or the cycle waits.
                refused = error.state == REFUSED
                ids = [e.id for each in ([of_queue] if refused else [of_queue, *waiting.values()]) for e in each]
                self._give_back(ids, holder)
                if not refused:
                    raise
                given_back += len(ids)
                self._queues.setdefault(queue_name, _Queue(queue_name)).refused(error)
        return given_back

    def _give_back(self, event_ids: Sequence[str], holder: str) -> None:
        self._database.write(lambda s: self._outbox.give_back(s, event_ids, holder, counted=False))

    def _send_to(self, queue_name: str, events: Sequence[OutboxEvent], jobs: Mapping[str, AiJob], holder: str) -> None:
        by_id = {event.id: event for event in events}
        failures = self._broker.send([outgoing(e, jobs[e.aggregate_id]) for e in events])
        sent = [event for event in events if event.id not in failures]
        if sent:
            self._outage.worked()
            self._backoff.reset()
            if queue_name in self._queues:
                self._queues.pop(queue_name).outage.worked()
            self._publish(sent, holder, sent=True)
        for event_id, error in failures.items():
            event = by_id[event_id]
            self._alone(event, partial(self._fail, event, jobs[event.aggregate_id], holder, error))

    def _publish(self, events: Sequence[OutboxEvent], holder: str, *, sent: bool) -> None:
        ids = [event.id for event in events]
        self._database.write(lambda s: self._outbox.mark_published(s, ids, holder, sent=sent))
        for event in events:
            logger.info("outbox.published", **_fields(event))

    def _set_aside(self, events: Sequence[OutboxEvent], holder: str) -> None:
        ids = [event.id for event in events]
        self._database.write(
            lambda s: self._outbox.mark_published(s, ids, holder, sent=False, last_error=UNKNOWN_EVENT_TYPE)
        )
        for event in events:
            logger.warning("outbox.unknown_event_type", eventType=event.event_type, **_fields(event))

    def _alone(self, event: OutboxEvent, action: Callable[[], int]) -> int:
        """Do something about one event; what goes wrong with it stops no other, and its claim runs out."""
        try:
            return action()
        except Exception as error:
            logger.error("outbox.event_failed", **fault(error), **_fields(event))
            return 0

    def _fail(self, event: OutboxEvent, job: AiJob, holder: str, error: Exception) -> int:
        reason = f"DISPATCH_FAILED: {type(error).__name__}"
        if event.attempt_count < MAX_ATTEMPTS:
            changed = self._database.write(lambda s: self._outbox.mark_failed(s, event, holder, reason))
        else:
            changed = self._bury(event, holder, reason)
        logger.warning("outbox.dispatch_failed", **fault(error), attempts=event.attempt_count, **_fields(event, job))
        return changed

    # --- claims that nobody came back for ------------------------------------------------------------------------

    def _release(self, event: OutboxEvent) -> int:
        holder = event.locked_by or ""
        if event.attempt_count < MAX_ATTEMPTS:
            return self._database.write(lambda s: self._outbox.give_back(s, [event.id], holder, counted=True))
        return self._bury(event, holder, "DISPATCH_FAILED: dispatcher lost")

    def _bury(self, event: OutboxEvent, holder: str, reason: str) -> int:
        """End an event, and in the same transaction the job that waits for it, so that no job is stranded.

        A job that no longer waits for this event is left alone, and the event is published instead. Where the claim
        is over, another dispatcher has the event, and its job is left alone too.
        """

        def bury(session: Session) -> int:
            if event.event_type == ENQUEUE and not self._give_up_job(session, event, reason):
                return self._outbox.mark_published(session, [event.id], holder, sent=False, last_error=reason)
            if not self._outbox.mark_dead(session, event, holder, reason):
                raise _ClaimOver  # After the job, whose row is always locked first: the rollback revives it.
            return 1

        try:
            return self._database.write(bury)
        except _ClaimOver:
            return 0

    def _give_up_job(self, session: Session, event: OutboxEvent, reason: str) -> bool:
        """Fail the job that waits for this event; False where none does any more."""
        job = session.get(AiJob, event.aggregate_id)
        if job is None or enqueue_key(job, job.attempt_no + 1) != event.dedupe_key:
            return False
        error = JobErrorInfo.of(NOT_DISPATCHED, reason)
        try:
            self._lifecycle.give_up(job.id, job.attempt_no + 1, error, session, instance_id=self._instance_id)
        except JobLockConflict:
            return False
        return True


class _ClaimOver(Exception):
    """The claim under which an event was to be ended is held no more."""


class Backoff:
    """A wait that doubles from 1 s to 15 s at each failure."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 15.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._wait_s = 0.0
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def lengthen(self) -> None:
        """Wait, longer than the last time."""
        self._wait_s = min(self._longest_s, self._wait_s * 2 or self._first_s)
        self._until = time.monotonic() + self._wait_s

    def reset(self) -> None:
        """Wait no more."""
        self._wait_s = self._until = 0.0


class _Queue:
    """A queue that the broker refuses: when to try it again, and what is said meanwhile."""

    def __init__(self, name: str) -> None:
        self.backoff = Backoff()
        self.outage = Outage(logger, "dispatcher.broker", queueName=name)

    def refused(self, error: BrokerUnavailable) -> None:
        self.outage.failed(error)
        self.backoff.lengthen()


def hand_over(broker: Broker, silence_s: float = 5.0) -> HandOver:
    """A creator's own sending after its commit: it marks nothing and never raises.

    After an error the process sends nothing for `silence_s`, so that a dead broker doesn't slow creation down; the
    dispatcher sends what was missed. If the broker refuses one queue, only that queue's messages are left.
    """
    outage = Outage(logger, "handover.broker")
    silent_until: dict[str | None, float] = {}

    def send(message: OutgoingMessage) -> None:
        if time.monotonic() < max(silent_until.get(None, 0.0), silent_until.get(message.queue_name, 0.0)):
            return
        try:
            failures = broker.send([message])
        except Exception as error:
            # Whatever it is: the job is committed, its creator has its answer, and the dispatcher sends it.
            alone = isinstance(error, BrokerUnavailable) and error.state == REFUSED
            silent_until[message.queue_name if alone else None] = time.monotonic() + silence_s
            if isinstance(error, BrokerUnavailable):
                outage.failed(error)
            else:
                fields = job_fields(jobId=message.message.job_id, queueName=message.queue_name)
                logger.error("handover.failed", **fault(error), where=where(error), **fields)
            return
        for failure in failures.values():
            logger.warning("handover.failed", error=type(failure).__name__, **job_fields(jobId=message.message.job_id))
        outage.worked()

    return send


def _fields(event: OutboxEvent, job: AiJob | None = None) -> dict[str, object]:
    return job_fields(
        job,
        jobId=event.aggregate_id,
        jobType=event.payload.get("jobType"),
        queueName=event.queue_name,
        outboxId=event.id,
    )
