"""Dispatch due outbox events: claim, send, mark published.

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
from aijobs.outbox.models import OutboxEvent, OutboxEventType
from aijobs.outbox.repository import MAX_ATTEMPTS, OutboxRepository, outgoing
from aijobs.queues.message import HandOver, OutgoingMessage
from aijobs.queues.state import REFUSED

logger = get_logger(__name__)

UNKNOWN_EVENT_TYPE = "UNKNOWN_EVENT_TYPE"
NOT_DISPATCHED = "INTERNAL_NOT_DISPATCHED"
FRESH_S, TRIED_S = 4.0, 1.0
"""How long a cycle dispatches fresh events, and those that were tried before. Fresh ones may come without an end: the
others would starve, and the cycle would never end or be recorded. A process that stops waits ten seconds for it."""
SILENCE_S = 5.0
"""How long a process hands no message over after an error of the broker."""


class Broker(Protocol):
    """What the passes need of the broker. `send` and `find_missing` raise `BrokerUnavailable` if it is away or refuses
    a queue. Callers pass one queue at a time, so they know which.
    """

    def send(self, messages: Sequence[OutgoingMessage]) -> Mapping[str, Exception]:
        """Add the messages that the broker doesn't hold. Return the errors of single messages by event id."""
        ...

    def find_missing(self, messages: Sequence[OutgoingMessage]) -> set[str]:
        """Return the event ids of the messages that the broker doesn't hold."""
        ...


class OutboxDispatcher:
    """One dispatcher of one process. Its claims name `instance_id`."""

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
        """Dispatch due events until none is left, for some seconds at most. Return the number of handled events.

        Fresh events go in batches. An event that has used an attempt goes alone, so that one that kills its dispatcher
        takes no other with it. While the broker is away, cycles do nothing until the backoff is over. While it refuses
        one queue, the events of that queue wait and the others are sent.
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
        """Put back the claims of dead dispatchers, or end events with no attempts left. Return their number."""
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
        """Claim and deliver due events until none is left or the time is up. Yield the number of each claim.

        A page that another dispatcher is claiming is skipped, so that one that stands still in its claim delays no
        event behind it. Finding tried events reads the whole backlog, so it is done once a page.
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
                if self._refused_queues() != refused:  # The rest of the page may be of the refused queue.
                    passed = 0
                    break

    def _refused_queues(self) -> list[str]:
        return [name for name, queue in self._queues.items() if not queue.backoff.is_over]

    def _claim_and_deliver(self, event_ids: Sequence[str]) -> int:
        """Claim and deliver the events that are still free. Return the number that was delivered."""
        holder = f"{self._instance_id}/{secrets.token_hex(8)}"
        events = self._database.write(lambda s: self._outbox.claim(s, event_ids, holder))
        if not events:
            return 0
        with self._database.read() as session:
            ids = {event.aggregate_id for event in events}
            jobs = {job.id: job for job in session.execute(select(AiJob).where(AiJob.id.in_(ids))).scalars()}
        return len(events) - self._deliver(events, jobs, holder)

    def _deliver(self, events: Sequence[OutboxEvent], jobs: Mapping[str, AiJob], holder: str) -> int:
        """Deliver claimed events. Return the number released because the broker refuses their queue."""
        enqueues = [e for e in events if e.event_type == OutboxEventType.ENQUEUE and e.aggregate_id in jobs]
        unknown = [e for e in events if e.event_type not in tuple(OutboxEventType)]
        rest = [e for e in events if e not in enqueues and e not in unknown]
        if unknown:
            self._set_aside(unknown, holder)
        if rest:
            self._publish(rest, holder, sent=False)
        return self._send(enqueues, jobs, holder)

    def _send(self, events: Sequence[OutboxEvent], jobs: Mapping[str, AiJob], holder: str) -> int:
        """Send the events of each queue separately. Return the number of released events."""
        waiting: dict[str, list[OutboxEvent]] = {}
        for event in events:
            waiting.setdefault(jobs[event.aggregate_id].queue_name, []).append(event)
        released = 0
        while waiting:
            queue_name, of_queue = waiting.popitem()
            try:
                self._send_to(queue_name, of_queue, jobs, holder)
            except BrokerUnavailable as error:
                # The events are not at fault, so their attempts don't count. The queue or the cycle waits.
                refused = error.state == REFUSED
                ids = [e.id for each in ([of_queue] if refused else [of_queue, *waiting.values()]) for e in each]
                self._release_claims(ids, holder)
                if not refused:
                    raise
                released += len(ids)
                self._queues.setdefault(queue_name, _Queue(queue_name)).refused(error)
        return released

    def _release_claims(self, event_ids: Sequence[str], holder: str) -> None:
        self._database.write(lambda s: self._outbox.release_claims(s, event_ids, holder, counted=False))

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
        """Handle one event. An error stops no other event; its claim expires."""
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

    # --- expired claims ------------------------------------------------------------------------------------------

    def _release(self, event: OutboxEvent) -> int:
        holder = event.locked_by or ""
        if event.attempt_count < MAX_ATTEMPTS:
            return self._database.write(lambda s: self._outbox.release_claims(s, [event.id], holder, counted=True))
        return self._bury(event, holder, "DISPATCH_FAILED: dispatcher lost")

    def _bury(self, event: OutboxEvent, holder: str, reason: str) -> int:
        """End an event and the job that waits for it in one transaction, so that no job waits for ever.

        If no job waits for it any more, the event is marked published instead. If the claim is over, another dispatcher
        has the event, and the job is left alone.
        """

        def bury(session: Session) -> int:
            if event.event_type == OutboxEventType.ENQUEUE and not self._give_up_job(session, event, reason):
                return self._outbox.mark_published(session, [event.id], holder, sent=False, last_error=reason)
            if not self._outbox.mark_dead(session, event, holder, reason):
                raise _ClaimOver  # The job's row is always locked first; the rollback restores it.
            return 1

        try:
            return self._database.write(bury)
        except _ClaimOver:
            return 0

    def _give_up_job(self, session: Session, event: OutboxEvent, reason: str) -> bool:
        """Fail the job that waits for this event. False if none does."""
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
    """Another dispatcher has the event."""


class Backoff:
    """A wait that doubles from 1 s to 15 s at each failure."""

    def __init__(self) -> None:
        self._wait_s = self._until = 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def lengthen(self) -> None:
        """Wait longer than the last time."""
        self._wait_s = min(15.0, self._wait_s * 2 or 1.0)
        self._until = time.monotonic() + self._wait_s

    def reset(self) -> None:
        """End the wait."""
        self._wait_s = self._until = 0.0


class _Queue:
    """A queue that the broker refuses: its backoff and its log of the outage."""

    def __init__(self, name: str) -> None:
        self.backoff = Backoff()
        self.outage = Outage(logger, "dispatcher.broker", queueName=name)

    def refused(self, error: BrokerUnavailable) -> None:
        self.outage.failed(error)
        self.backoff.lengthen()


def hand_over(broker: Broker) -> HandOver:
    """Return a function that sends a new job's message right after the commit. It marks nothing and never raises.

    After an error the process sends nothing for `SILENCE_S`, so that a dead broker doesn't slow creation; the
    dispatcher sends what was missed. If the broker refuses one queue, only that queue is left out.
    """
    outage = Outage(logger, "handover.broker")
    silent_until: dict[str | None, float] = {}

    def send(message: OutgoingMessage) -> None:
        if time.monotonic() < max(silent_until.get(None, 0.0), silent_until.get(message.queue_name, 0.0)):
            return
        try:
            failures = broker.send([message])
        except Exception as error:
            # Any error: the job is committed, and the dispatcher sends its message.
            alone = isinstance(error, BrokerUnavailable) and error.state == REFUSED
            silent_until[message.queue_name if alone else None] = time.monotonic() + SILENCE_S
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
