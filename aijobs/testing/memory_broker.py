"""A broker in memory, for tests of what stands above it. Obeys the conformance tests of `RedisBroker`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

from aijobs.errors import BrokerUnavailable
from aijobs.queues.broker import huey_name, score
from aijobs.queues.codec import PREFIX_BYTES, BadMessage, decode, encode_member
from aijobs.queues.message import JobMessage, OutgoingMessage
from aijobs.settings import KeyRing


class MemoryBroker:
    """Set `away` to have it fail as a broker out of reach does. `sent` counts the calls of `send`."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self._guard = threading.Lock()
        self._queues: dict[str, dict[bytes, int]] = defaultdict(dict)
        self._hints: set[str] = set()
        self.away = False
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
                    self._reach()
                    self._queues[message.queue_name].setdefault(member, score(message.priority))
            return failures

    def find_missing(self, messages: Iterable[OutgoingMessage]) -> set[str]:
        """See `RedisBroker.find_missing`."""
        with self._guard:
            self._reach()
            return {message.event_id for message in messages if not self._holds(message)}

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
            self._reach()
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

    def ping(self) -> None:
        """See `RedisBroker.ping`."""
        self._reach()

    def take(self, queue_name: str) -> JobMessage | None:
        """Pop the next message as a worker would: best priority first, then in the order of their events."""
        with self._guard:
            self._reach()
            queue = self._queues[queue_name]
            if not queue:
                return None
            member = min(queue, key=lambda one: (queue[one], one))
            del queue[member]
            return decode(member[PREFIX_BYTES:], self._keys, queue_name).message

    def lose_all(self) -> None:
        """Forget everything, as a restart without persistence does."""
        with self._guard:
            self._queues.clear()
            self._hints.clear()

    def _reach(self) -> None:
        if self.away:
            raise BrokerUnavailable("broker: away")

    def _member(self, message: OutgoingMessage) -> bytes:
        huey_name(message.queue_name)
        return encode_member(message, self._keys)

    def _holds(self, message: OutgoingMessage) -> bool:
        try:
            return self._member(message) in self._queues[message.queue_name]
        except BadMessage:
            return False
