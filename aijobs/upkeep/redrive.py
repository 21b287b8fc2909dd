"""Finds jobs that wait for a worker while the broker no longer holds their message, and sends it again.

Proof is membership, not age: a long but healthy backlog gets no second messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from sqlalchemy import and_, exists, or_, select
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.errors import BrokerUnavailable
from aijobs.jobs.lifecycle import DUE_AT
from aijobs.jobs.models import AiJob, QueuePause
from aijobs.jobs.status import OPEN, QUEUED
from aijobs.logs import Outage, get_logger, job_fields
from aijobs.outbox.keys import enqueue_key
from aijobs.outbox.models import PUBLISHED, OutboxEvent
from aijobs.outbox.repository import OutboxRepository, outgoing
from aijobs.upkeep.dispatcher import Broker

logger = get_logger(__name__)


class Redrive:
    """Looks for lost messages, page by page. Sending twice is harmless, so any number may run at once."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        outbox: OutboxRepository,
        broker: Broker,
        *,
        due_for: timedelta = timedelta(seconds=5),
        page: int = 500,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`due_for`: how long a job has been due before its message is looked for; `progress` is called each page."""
        self._database, self._clock, self._outbox, self._broker = database, clock, outbox, broker
        self._due_for, self._page, self._progress = due_for, page, progress
        self._outage = Outage(logger, "redrive.broker")

    def run(self, queue_name: str | None = None, *, due_for: timedelta | None = None) -> int:
        """Send again what is missing, of one queue or of all; how many messages were sent.

        `due_for` other than the usual is for a consumer that starts, and looks at once.
        """
        sent, waited = 0, self._due_for if due_for is None else due_for
        try:
            for jobs in self._waiting(queue_name, waited):
                sent += self._send_missing(jobs, waited)
                self._progress()
        except BrokerUnavailable as error:
            self._outage.failed(error)
        return sent

    def _waiting(self, queue_name: str | None, due_for: timedelta) -> Iterator[Sequence[AiJob]]:
        """Pages of jobs that have waited for a worker since they were due, most urgent first within a page."""
        paused = exists().where(QueuePause.queue_name == AiJob.queue_name)
        waits = or_(AiJob.lifecycle_status == QUEUED, AiJob.locked_by.is_(None))
        query = (
            select(AiJob)
            .where(
                AiJob.lifecycle_status.in_(OPEN),
                and_(waits, ~paused, AiJob.cancel_requested_at.is_(None)),
                DUE_AT <= self._clock.now(-due_for),
            )
            .order_by(AiJob.id)
            .limit(self._page)
        )
        if queue_name is not None:
            query = query.where(AiJob.queue_name == queue_name)
        after = ""
        while True:
            with self._database.read() as session:
                page = list(session.execute(query.where(AiJob.id > after)).scalars())
            if not page:
                return
            after = page[-1].id
            yield sorted(page, key=lambda job: (job.priority, job.id))

    def _send_missing(self, jobs: Sequence[AiJob], waited: timedelta) -> int:
        by_key = {enqueue_key(job, job.attempt_no + 1): job for job in jobs}
        with self._database.read() as session:
            events = self._published(session, list(by_key), waited)
        if not events:
            return 0
        messages = {event.id: outgoing(event, by_key[event.dedupe_key]) for event in events}
        missing = self._broker.find_missing(list(messages.values()))
        lost = [event for event in events if event.id in missing]
        if not lost:
            self._outage.worked()
            return 0
        # Counted before it is sent: where this process dies between the two, the next pass finds it missing again.
        counted = self._database.write(lambda s: [event for event in lost if self._outbox.count_redrive(s, event)])
        failures = self._broker.send([messages[event.id] for event in counted])
        self._outage.worked()  # Not before: a broker that is full answers questions, and takes nothing.
        for event in counted:
            if event.id in failures:
                self._sign_anew(event, failures[event.id])
                continue
            job = by_key[event.dedupe_key]
            fields = job_fields(job, outboxId=event.id, attemptNo=job.attempt_no + 1)
            logger.warning("outbox.redriven", redrives=event.redrives + 1, **fields)
        return len(counted)

    def _sign_anew(self, event: OutboxEvent, why: Exception) -> None:
        """An event whose key was taken out of the ring goes out under today's with the next pass."""
        logger.warning(
            "outbox.signed_anew", error=type(why).__name__, **job_fields(jobId=event.aggregate_id, outboxId=event.id)
        )
        self._database.write(lambda session: self._outbox.sign_anew(session, event))

    def _published(self, session: Session, dedupe_keys: Sequence[str], waited: timedelta) -> list[OutboxEvent]:
        """The events of these keys that went out, and that nobody sent again just now."""
        just_now = self._clock.now(-waited)
        return list(
            session.execute(
                select(OutboxEvent).where(
                    OutboxEvent.dedupe_key.in_(dedupe_keys),
                    OutboxEvent.status == PUBLISHED,
                    or_(OutboxEvent.last_sent_at.is_(None), OutboxEvent.last_sent_at <= just_now),
                )
            ).scalars()
        )
