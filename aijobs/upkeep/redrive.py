"""Re-drive: find jobs that wait for a worker and whose message the broker has lost, and send it again.

The proof is that the broker lacks the message, not its age: a long but healthy backlog gets no second messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.errors import BrokerUnavailable
from aijobs.jobs.conditions import DUE_AT, NO_CANCEL, PAUSED, WAITS
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import OPEN
from aijobs.logs import Outage, get_logger, job_fields
from aijobs.outbox.keys import enqueue_key
from aijobs.outbox.models import OutboxEvent, OutboxState
from aijobs.outbox.repository import OutboxRepository, outgoing
from aijobs.queues.message import OutgoingMessage
from aijobs.queues.state import REFUSED
from aijobs.upkeep.dispatcher import Broker

logger = get_logger(__name__)


class _Sent(NamedTuple):
    """A published event, its job, and the message that the broker must hold."""

    event: OutboxEvent
    job: AiJob
    message: OutgoingMessage


class Redrive:
    """Finds lost messages, page by page. A second message is harmless, so any number may run at once."""

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
        """`due_for`: how long a job is due before its message is checked. `progress` is called for each page."""
        self._database, self._clock, self._outbox, self._broker = database, clock, outbox, broker
        self._due_for, self._page, self._progress = due_for, page, progress
        self._outage = Outage(logger, "redrive.broker")
        self._refused: dict[str, Outage] = {}

    def run(self, queue_name: str | None = None, *, due_for: timedelta | None = None) -> int:
        """Send missing messages again, of one queue or all. Return the number of messages that were sent.

        A queue that the broker refuses waits for the next pass and delays no other. A consumer that starts passes its
        own `due_for`, to check at once.
        """
        sent, waited, refused = 0, self._due_for if due_for is None else due_for, set[str]()
        try:
            for jobs in self._waiting(queue_name, waited):
                for name, went_out in self._find_sent([job for job in jobs if job.queue_name not in refused], waited):
                    try:
                        sent += self._send_missing(went_out)
                        self._outage_of(name).worked()
                    except BrokerUnavailable as error:
                        if error.state != REFUSED:
                            raise
                        refused.add(name)
                        self._outage_of(name).failed(error)
                self._progress()
        except BrokerUnavailable as error:
            self._outage.failed(error)
        return sent

    def _waiting(self, queue_name: str | None, due_for: timedelta) -> Iterator[Sequence[AiJob]]:
        """Yield pages of jobs that have waited for a worker, the most urgent first within a page."""
        query = (
            select(AiJob)
            .where(
                AiJob.lifecycle_status.in_(OPEN),
                WAITS,
                ~PAUSED,
                NO_CANCEL,
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

    def _find_sent(self, jobs: Sequence[AiJob], waited: timedelta) -> list[tuple[str, list[_Sent]]]:
        """Return the published events of these jobs by queue, each with its job."""
        by_key = {enqueue_key(job, job.attempt_no + 1): job for job in jobs}
        found: dict[str, list[_Sent]] = {}
        with self._database.read() as session:
            for event in self._published(session, list(by_key), waited):
                job = by_key[event.dedupe_key]
                found.setdefault(job.queue_name, []).append(_Sent(event, job, outgoing(event, job)))
        return list(found.items())

    def _send_missing(self, sent: Sequence[_Sent]) -> int:
        """Send the messages that the broker lacks. Return their number."""
        missing = self._broker.find_missing([each.message for each in sent])
        lost = [each for each in sent if each.event.id in missing]
        if not lost:
            self._outage.worked()
            return 0
        # Count before sending: if this process dies in between, the next pass finds it missing again.
        counted = self._database.write(lambda s: [each for each in lost if self._outbox.count_redrive(s, each.event)])
        failures = self._broker.send([each.message for each in counted])
        self._outage.worked()  # Only now: a full broker answers reads and refuses writes.
        for event, job, _ in counted:
            if event.id in failures:
                self._sign_anew(event, failures[event.id])
                continue
            fields = job_fields(job, outboxId=event.id, attemptNo=job.attempt_no + 1)
            logger.warning("outbox.redriven", redrives=event.redrives + 1, **fields)
        return len(counted)

    def _outage_of(self, queue_name: str) -> Outage:
        return self._refused.setdefault(queue_name, Outage(logger, "redrive.broker", queueName=queue_name))

    def _sign_anew(self, event: OutboxEvent, why: Exception) -> None:
        """Give the event today's key, because its own is gone from the ring. The next pass sends it."""
        logger.warning(
            "outbox.signed_anew", error=type(why).__name__, **job_fields(jobId=event.aggregate_id, outboxId=event.id)
        )
        self._database.write(lambda session: self._outbox.sign_anew(session, event))

    def _published(self, session: Session, dedupe_keys: Sequence[str], waited: timedelta) -> list[OutboxEvent]:
        """Return the published events with these keys that were not sent again within `waited`."""
        just_now = self._clock.now(-waited)
        return list(
            session.execute(
                select(OutboxEvent).where(
                    OutboxEvent.dedupe_key.in_(dedupe_keys),
                    OutboxEvent.status == OutboxState.PUBLISHED,
                    or_(OutboxEvent.last_sent_at.is_(None), OutboxEvent.last_sent_at <= just_now),
                )
            ).scalars()
        )
