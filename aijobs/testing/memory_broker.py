"""A broker in memory for tests. It passes the conformance tests of `RedisBroker`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from aijobs.definitions.definition import QUEUES
from aijobs.errors import BrokerUnavailable
from aijobs.queues.broker import huey_name, score
from aijobs.queues.codec import PREFIX_BYTES, BadMessage, decode, encode_member
from aijobs.queues.message import JobMessage, OutgoingMessage
from aijobs.queues.state import AWAY, OK, REFUSED, TAKES_NO_WRITES, BrokerState, QueueState
from aijobs.settings import KeyRing


class MemoryBroker:
    """Set `away` to have it fail like an unreachable broker, and `refuses` to the queues that it refuses. `sent` counts
    the calls of `send`.
    """

    window: Any = None
    """The client for heartbeats in Redis; here there are none."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self._guard = threading.Lock()
        self._queues: dict[str, dict[bytes, int]] = defaultdict(dict)
        self._hints: set[str] = set()
        self.away = False
        self.refuses: set[str] = set()
        self.sent = 0

    def send(self, messages: Sequence[OutgoingMessage]) -> dict[str, Exception]:
        """See `RedisBroker.send`."""
        with self._guard:
            self.sent += 1
            failures: dict[str, Exception] = {}
            for message in messages:
                try:
                    member = self._member(message)
                except BadMessage as error:
                    failures[message.event_id] = error
                else:
                    self._reach(message.queue_name)
                    self._queues[message.queue_name].setdefault(member, score(message.priority))
            return failures

    def find_missing(self, messages: Iterable[OutgoingMessage]) -> set[str]:
        """See `RedisBroker.find_missing`."""
        with self._guard:
            asked = list(messages)
            self._reach(*(message.queue_name for message in asked))
            return {message.event_id for message in asked if not self._holds(message)}

    def remove(self, message: OutgoingMessage) -> bool:
        """See `RedisBroker.remove`."""
        with self._guard:
            if self.away or not self._holds(message):
                return False
            del self._queues[message.queue_name][self._member(message)]
            return True

    def pending_count(self, queue_name: str) -> int:
        """See `RedisBroker.pending_count`."""
        with self._guard:
            self._reach(queue_name)
            huey_name(queue_name)
            return len(self._queues[queue_name])

    def hint_cancel(self, job_id: str) -> None:
        """See `RedisBroker.hint_cancel`; here hints never run out."""
        with self._guard:
            if not self.away:
                self._hints.add(job_id)

    def find_cancel_hints(self, job_ids: Iterable[str]) -> set[str]:
        """See `RedisBroker.find_cancel_hints`."""
        with self._guard:
            return set() if self.away else self._hints.intersection(job_ids)

    def probe(self) -> BrokerState:
        """See `RedisBroker.probe`."""
        if self.away:
            return BrokerState(AWAY, "away")
        refused = {name: QueueState(TAKES_NO_WRITES, "refused") for name in self.refuses}
        with self._guard:
            queues = {name: refused.get(name) or QueueState(depth=len(self._queues[name])) for name in QUEUES}
        return BrokerState(TAKES_NO_WRITES if refused else OK, "refused" if refused else None, queues)

    def ping(self) -> None:
        """See `RedisBroker.ping`."""
        self._reach()

    def take(self, queue_name: str) -> JobMessage | None:
        """Pop the next message like a worker: best priority first, then in the order of their events."""
        with self._guard:
            self._reach(queue_name)
            queue = self._queues[queue_name]
            if not queue:
                return None
            member = min(queue, key=lambda one: (queue[one], one))
            del queue[member]
            return decode(member[PREFIX_BYTES:], self._keys, queue_name).message

    def lose_all(self) -> None:
        """Remove all messages, like a restart without persistence."""
        with self._guard:
            self._queues.clear()
            self._hints.clear()

    def _reach(self, *queue_names: str) -> None:
        if self.away:
            raise BrokerUnavailable("away")
        if self.refuses.intersection(queue_names):
            raise BrokerUnavailable("refused", REFUSED)

    def _member(self, message: OutgoingMessage) -> bytes:
        huey_name(message.queue_name)
        return encode_member(message, self._keys)

    def _holds(self, message: OutgoingMessage) -> bool:
        try:
            return self._member(message) in self._queues[message.queue_name]
        except BadMessage:
            return False
