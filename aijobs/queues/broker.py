"""Send messages once, find them, and remove them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import redis

from aijobs.definitions.definition import MAINTENANCE_QUEUE, QUEUES
from aijobs.errors import BrokerUnavailable
from aijobs.logs import Outage, get_logger
from aijobs.queues.codec import BadMessage, encode_member
from aijobs.queues.connection import HINT_TIMEOUT_S, SHORT_TIMEOUT_S, ImpatientClient, connect, unavailable
from aijobs.queues.message import OutgoingMessage
from aijobs.queues.probe import probe
from aijobs.queues.state import BrokerState
from aijobs.settings import KeyRing, Settings

CHUNK = 500
CANCEL_TTL_S = 300
HINT_PAUSE_S = 5.0
"""The pause after a failed hint. The database decides anyway."""

logger = get_logger(__name__)


def huey_name(queue_name: str) -> str:
    """Return Huey's name of a queue: `aijobs_interactive` for `ai-interactive`. `BadMessage` for an unknown queue."""
    if queue_name not in QUEUES and queue_name != MAINTENANCE_QUEUE:
        raise BadMessage(f"unknown queue {queue_name}")
    return "aijobs_" + queue_name.removeprefix("ai-")


def queue_key(queue_name: str) -> str:
    """Return the key of the sorted set in which Huey keeps a queue."""
    return f"huey.redis.{huey_name(queue_name)}"


def score(priority: int) -> int:
    """Return the score of a priority (0 first … 100). Huey's priority is `100 - priority`, highest first. Huey pops the
    lowest score, which is minus its priority.
    """
    huey_priority = 100 - priority
    return -huey_priority


def cancel_key(job_id: str) -> str:
    """Return the key of the hint that a cancel was requested."""
    return f"job:cancel:{job_id}"


class RedisBroker:
    """The queues in Redis or Valkey, one object per process. Its methods may be called from any thread."""

    def __init__(self, client: redis.Redis, hints: ImpatientClient, window: ImpatientClient, keys: KeyRing) -> None:
        """`window`: the client with short timeouts for people and provider calls. `hints`: the one for best-effort
        hints.
        """
        self.client, self.window = client, window
        self._hints, self._keys = hints, keys
        self._hint_outage = Outage(logger, "broker.hints")

    @classmethod
    def from_settings(cls, settings: Settings) -> RedisBroker:
        """Return the broker of the settings, not connected yet. `SettingsError` if they name none."""
        return cls.at(settings.broker_url(), settings.message_keys)

    @classmethod
    def at(cls, url: str, keys: KeyRing) -> RedisBroker:
        """Return the broker at `url`, not connected yet. `SettingsError` if the URL can't be read."""
        hints = ImpatientClient(connect(url, timeout_s=HINT_TIMEOUT_S), HINT_PAUSE_S)
        return cls(connect(url), hints, ImpatientClient(connect(url, timeout_s=SHORT_TIMEOUT_S)), keys)

    def send(self, messages: Sequence[OutgoingMessage]) -> dict[str, Exception]:
        """Add each message that isn't queued yet, in one round trip. Sending again is harmless.

        Return the errors of messages that can't be sent, by event id. `BrokerUnavailable` for any error of the broker:
        then it is unknown which messages arrived.
        """
        members, failures = self._encode(messages)
        if members:
            pipeline = self.client.pipeline(transaction=False)
            for message, member in members:
                pipeline.zadd(queue_key(message.queue_name), {member: score(message.priority)}, nx=True)
            self._run(pipeline.execute)
        return failures

    def find_missing(self, messages: Iterable[OutgoingMessage]) -> set[str]:
        """Return the event ids of the messages that the broker doesn't hold, including those that can't be sent at all.

        `BrokerUnavailable` if it can't be asked.
        """
        members, failures = self._encode(messages)
        missing = set(failures)
        by_queue: dict[str, list[tuple[OutgoingMessage, bytes]]] = defaultdict(list)
        for message, member in members:
            by_queue[message.queue_name].append((message, member))
        for queue_name, entries in by_queue.items():
            for chunk in _chunks(entries):
                scores = self._run(self.client.zmscore, queue_key(queue_name), [member for _, member in chunk])
                missing.update(
                    message.event_id for (message, _), found in zip(chunk, scores, strict=True) if found is None
                )
        return missing

    def remove(self, message: OutgoingMessage) -> bool:
        """Remove a queued message and return whether it was there. Best effort, never raises: a worker drops the
        message of a final job anyway.
        """
        members, _ = self._encode([message])
        key = queue_key(message.queue_name)
        return any(self._hint(partial(_remove, key, member)) for _, member in members)

    def pending_count(self, queue_name: str) -> int:
        """Return the number of messages in a queue. `BrokerUnavailable`."""
        return int(self._run(self.client.zcard, queue_key(queue_name)))

    def hint_cancel(self, job_id: str) -> None:
        """Leave workers the hint that a cancel was requested. Never raises: the database decides."""
        self._hint(lambda client: client.set(cancel_key(job_id), b"1", ex=CANCEL_TTL_S))

    def find_cancel_hints(self, job_ids: Iterable[str]) -> set[str]:
        """Return the ids of those jobs that have such a hint; none while the broker is away. Never raises, never waits
        long.
        """
        ids = list(job_ids)
        if not ids:
            return set()
        found = self._hint(lambda client: client.mget([cancel_key(job_id) for job_id in ids]))
        return {job_id for job_id, hint in zip(ids, found or (), strict=False) if hint is not None}

    def close(self) -> None:
        """Close the connections. The next message opens new ones."""
        self.client.connection_pool.disconnect()

    def probe(self) -> BrokerState:
        """Return the state of the broker and of the job queues. Never raises, never waits long."""
        return probe(self.window, {name: queue_key(name) for name in QUEUES})

    def ping(self) -> None:
        """Raise `BrokerUnavailable` unless the broker answers."""
        self._run(self.client.ping)

    def _encode(
        self, messages: Iterable[OutgoingMessage]
    ) -> tuple[list[tuple[OutgoingMessage, bytes]], dict[str, Exception]]:
        members, failures = [], dict[str, Exception]()
        for message in messages:
            try:
                huey_name(message.queue_name)
                members.append((message, encode_member(message, self._keys)))
            except BadMessage as error:
                failures[message.event_id] = error
        return members, failures

    def _run(self, command: Any, *args: Any) -> Any:
        try:
            return command(*args)
        except redis.RedisError as error:
            raise unavailable(self.client, error) from error

    def _hint(self, question: Callable[[redis.Redis], Any]) -> Any:
        """Return the answer; None while the broker is away, and for `HINT_PAUSE_S` after that."""
        try:
            answer = self._hints.ask(question)
        except BrokerUnavailable as error:
            self._hint_outage.failed(error)
            return None
        self._hint_outage.worked()
        return answer


def _remove(key: str, member: bytes, client: redis.Redis) -> Any:
    return client.zrem(key, member)


def _chunks(entries: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(entries)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk
