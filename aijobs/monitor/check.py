"""Check a database against the promises: each rule is one statement that returns the jobs that break it.

It may run on a live database at any time: a statement has one snapshot, and slow steps get the time they may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from aijobs.clock import Stopwatch
from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.errors import BrokerUnavailable
from aijobs.jobs.conditions import DUE_AT, PAUSED, WAITS
from aijobs.jobs.models import AiJob
from aijobs.monitor.check_rules import RULES, UNSENT, Bounds, Rule
from aijobs.outbox.keys import enqueue_key
from aijobs.outbox.models import OutboxEvent, OutboxState
from aijobs.outbox.repository import outgoing
from aijobs.queues.message import OutgoingMessage

PAGE = 500
MOST_ROWS, MOST_JOBS = 50_000, 10_001
"""Maximum rows that are read for one rule, and maximum jobs that are counted."""
MAX_REPEATS = 20
"""Maximum repeats of a look at findings that become fewer, before the rest counts as broken."""

LOST_MESSAGE = "has long been due, and the broker does not hold its message"
_LOOKED_FOR = (*((rule.promise, rule.what) for rule in RULES), (5, LOST_MESSAGE))

T = TypeVar("T")


class CheckedBroker(Protocol):
    """What the check asks of the broker. `BrokerUnavailable` while it is away."""

    def ping(self) -> None:
        """Raise unless the broker answers."""
        ...

    def find_missing(self, messages: Sequence[OutgoingMessage]) -> set[str]:
        """Return the event ids of the messages that the broker doesn't hold."""
        ...


@dataclass(frozen=True)
class Finding:
    """A broken rule: the promise, what is wrong, and the jobs (the first few, and their number)."""

    promise: int
    what: str
    job_ids: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Report:
    """The result of a check. `broker`: asked, away, or not asked."""

    findings: tuple[Finding, ...]
    rules: int
    jobs: int
    broker: str
    left_out: tuple[str, ...]
    """Rules that weren't checked, because they need the broker."""
    seconds: float

    @property
    def is_sound(self) -> bool:
        return not self.findings


class Check:
    """Runs every rule."""

    def __init__(
        self, database: Database, clock: Clock, broker: CheckedBroker | None, bounds: Bounds | None = None
    ) -> None:
        """Without `broker`, messages aren't checked."""
        self._database, self._clock, self._broker = database, clock, broker
        self._bounds = bounds or Bounds()

    def run(self, show: int = 20) -> Report:
        """Return every broken promise, with up to `show` job ids each."""
        watch = Stopwatch()
        with self._database.read() as session:
            jobs = session.execute(select(func.count()).select_from(AiJob)).scalar_one()
        broken = {rule.what: self.find_broken(rule) for rule in RULES if rule is not UNSENT}
        undelivered, broker = self._undelivered()
        broken |= undelivered
        findings = tuple(
            Finding(promise, what, tuple(job_ids[:show]), len(job_ids))
            for promise, what in _LOOKED_FOR
            if (job_ids := broken.get(what))
        )
        left_out = tuple(what for _, what in _LOOKED_FOR if what not in broken)
        return Report(findings, len(broken), jobs, broker, left_out, watch.seconds)

    def find_broken(self, rule: Rule) -> list[str]:
        """Return the ids of the jobs that break `rule`, each once, up to `MOST_JOBS`."""
        return self._ids(self.query(rule))

    def _ids(self, query: Select[str]) -> list[str]:
        with self._database.read() as session:
            return list(dict.fromkeys(session.execute(query).scalars()))[:MOST_JOBS]

    def query(self, rule: Rule) -> Select[str]:
        """Return the statement of `rule`."""
        return rule.broken(self._clock, self._bounds).limit(MOST_ROWS)

    def _undelivered(self) -> tuple[dict[str, list[str]], str]:
        """Return the overdue jobs that no message or event leads to a worker, by what is wrong, and whether the broker
        was asked.

        A broker that is away breaks no promise, because events wait for it: then nothing is reported. It is asked again
        after the look, because an outage may have begun meanwhile.
        """
        if self._broker is None:
            return {UNSENT.what: sorted(self._stays(self._unsent))}, "not asked"
        try:
            self._broker.ping()
            unsent = self._stays(self._unsent)
            self._broker.ping()
            lost = self._stays(self._missing)
        except BrokerUnavailable:
            return {}, "away"
        return {UNSENT.what: sorted(unsent), LOST_MESSAGE: sorted(job_id for job_id, _ in lost)}, "asked"

    def _stays(self, look: Callable[[set[T] | None], set[T]]) -> set[T]:
        """Return what `look` finds, repeated until the findings become no fewer.

        A message may be popped during the look; the re-drive may not have found a new loss yet; a resumed queue and a
        broker that came back have overdue events. While each look finds less, somebody is at work, and only the rest
        counts.
        """
        found = look(None)
        for _ in range(MAX_REPEATS):
            if not found:
                break
            time.sleep(self._bounds.redrive.total_seconds())
            left = found & look(found)
            if left == found:
                break
            found = left
        return found

    def _unsent(self, among: set[str] | None) -> set[str]:
        """Return the jobs with an overdue unsent event, of all or of `among`."""
        query = self.query(UNSENT)
        if among is None:
            # In the dispatcher's order, so that the next look reads those that it takes next.
            return set(self._ids(query.order_by(OutboxEvent.available_at, OutboxEvent.id)))
        return {job_id for ids in _pages(among) for job_id in self._ids(query.where(OutboxEvent.aggregate_id.in_(ids)))}

    def _missing(self, among: set[tuple[str, int]] | None) -> set[tuple[str, int]]:
        """Return (job id, attempt) of overdue jobs whose event was sent and whose message is missing, of all or of
        `among`.
        """
        missing: set[tuple[str, int]] = set()
        for jobs in self._overdue(None if among is None else {job_id for job_id, _ in among}):
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
        query = select(AiJob).where(WAITS, ~PAUSED, DUE_AT <= self._clock.now(-self._bounds.undelivered))
        if among is not None:
            for ids in _pages(among):
                with self._database.read() as session:
                    yield session.execute(query.where(AiJob.id.in_(ids))).scalars().all()
            return
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
                    OutboxEvent.dedupe_key.in_(dedupe_keys), OutboxEvent.status == OutboxState.PUBLISHED, sent
                )
            ).scalars()
        )


def _pages(ids: set[str]) -> Iterator[list[str]]:
    ordered = sorted(ids)
    for start in range(0, len(ordered), PAGE):
        yield ordered[start : start + PAGE]
