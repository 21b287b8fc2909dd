"""Holds a database against the promises: each rule is one statement that names the jobs which break it.

Runs on a live database at any time: a statement sees one instant, and what is allowed to take a while is given it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from aijobs.clock import Stopwatch
from aijobs.db import Clock, Database
from aijobs.errors import BrokerUnavailable
from aijobs.jobs.lifecycle import DUE_AT
from aijobs.jobs.models import AiJob
from aijobs.monitor.check_rules import PAUSED, PROMISES, RULES, WAITS, Bounds, Rule
from aijobs.outbox.keys import enqueue_key
from aijobs.outbox.models import PUBLISHED, OutboxEvent
from aijobs.outbox.repository import outgoing
from aijobs.queues.message import OutgoingMessage

__all__ = ["LOST_MESSAGE", "PROMISES", "RULES", "Bounds", "Check", "Finding", "Report", "Rule"]

PAGE = 500
MOST_ROWS, MOST_JOBS = 50_000, 10_001
"""How much of one rule's answer is read, and how many jobs of it are counted: that many say that it is bad enough."""

LOST_MESSAGE = "has long been due, and the broker does not hold its message"


class MissingMessages(Protocol):
    """What the check asks of the broker."""

    def find_missing(self, messages: Sequence[OutgoingMessage]) -> set[str]:
        """The event ids of those messages that the broker does not hold. `BrokerUnavailable`."""
        ...


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
            if broken := self.find_broken(rule):
                findings.append(Finding(rule.promise, rule.what, tuple(broken[:show]), len(broken)))
        lost, broker = self._lost_messages()
        if lost:
            findings.append(Finding(5, LOST_MESSAGE, tuple(lost[:show]), len(lost)))
        return Report(tuple(findings), len(RULES) + 1, jobs, broker, watch.seconds)

    def find_broken(self, rule: Rule) -> list[str]:
        """The ids of the jobs that break `rule`, each once, up to `MOST_JOBS`."""
        with self._database.read() as session:
            found = session.execute(self.query(rule)).scalars()
            return list(dict.fromkeys(found))[:MOST_JOBS]

    def query(self, rule: Rule) -> Select[str]:
        """The statement of `rule`."""
        return rule.broken(self._clock, self._bounds).limit(MOST_ROWS)

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
        query = select(AiJob).where(WAITS, ~PAUSED, DUE_AT <= self._clock.now(-self._bounds.undelivered))
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
