"""The conveyor's near end: messages are added once, looked for, and taken back."""

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
from aijobs.queues.look import look_at
from aijobs.queues.message import OutgoingMessage
from aijobs.queues.state import BrokerState
from aijobs.settings import KeyRing, Settings

CHUNK = 500
CANCEL_TTL_S = 300
HINT_PAUSE_S = 5.0
"""After a hint failed, for so long none is asked for: the database decides anyway."""

logger = get_logger(__name__)


def huey_name(queue_name: str) -> str:
    """Huey's name of a queue: `ai-interactive` is `aijobs_interactive`. `BadMessage` for a queue that isn't
    ours."""
    if queue_name not in QUEUES and queue_name != MAINTENANCE_QUEUE:
        raise BadMessage(f"unknown queue {queue_name}")
    return "aijobs_" + queue_name.removeprefix("ai-")


def queue_key(queue_name: str) -> str:
    """The sorted set in which Huey keeps a queue."""
    return f"huey.redis.{huey_name(queue_name)}"


def score(priority: int) -> int:
    """The score of our priority (0 first … 100). Huey's own is `100 - priority`, highest first, and it pops
    the lowest score, which is minus Huey's priority."""
    huey_priority = 100 - priority
    return -huey_priority


def cancel_key(job_id: str) -> str:
    """The hint that a cancel was requested."""
    return f"job:cancel:{job_id}"


class RedisBroker:
    """The queues in Redis or Valkey. One per process; its methods may be called from any thread."""

    def __init__(self, client: redis.Redis, hints: ImpatientClient, window: ImpatientClient, keys: KeyRing) -> None:
        """`window` is for what people and provider calls wait for, `hints` for courtesies."""
        self.client, self.window = client, window
        self._hints, self._keys = hints, keys
        self._hint_outage = Outage(logger, "broker.hints")

    @classmethod
    def from_settings(cls, settings: Settings) -> RedisBroker:
        """The broker that the settings name; nothing is connected yet. `SettingsError` where they name
        none."""
        return cls.at(settings.broker_url(), settings.message_keys)

    @classmethod
    def at(cls, url: str, keys: KeyRing) -> RedisBroker:
        """The broker at an address; nothing is connected yet. `SettingsError` for one that can't be read."""
        hints = ImpatientClient(connect(url, timeout_s=HINT_TIMEOUT_S), HINT_PAUSE_S)
        return cls(connect(url), hints, ImpatientClient(connect(url, timeout_s=SHORT_TIMEOUT_S)), keys)

    def send(self, messages: Sequence[OutgoingMessage]) -> dict[str, Exception]:
        """Add each message that isn't queued yet, in one round trip; sending again is harmless.

        Returns, by event id, the messages that can't be sent because of what they are. `BrokerUnavailable`
        for any trouble with the broker: then it is unknown which of them arrived.
        """
        members, failures = self._encode(messages)
        if members:
            pipeline = self.client.pipeline(transaction=False)
            for message, member in members:
                pipeline.zadd(queue_key(message.queue_name), {member: score(message.priority)}, nx=True)
            self._run(pipeline.execute)
        return failures

    def find_missing(self, messages: Iterable[OutgoingMessage]) -> set[str]:
        """The event ids whose message the broker doesn't hold, those included that can't be sent at all.

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
        """Take a queued message out; whether it was there. Never raises: removing is a courtesy, and
        whoever pops the message of a job that is final drops it."""
        members, _ = self._encode([message])
        key = queue_key(message.queue_name)
        return any(self._hint(partial(_remove, key, member)) for _, member in members)

    def pending_count(self, queue_name: str) -> int:
        """How many messages wait in a queue. `BrokerUnavailable`."""
        return int(self._run(self.client.zcard, queue_key(queue_name)))

    def hint_cancel(self, job_id: str) -> None:
        """Leave workers the hint that this job's cancel was requested. Never raises: the database decides."""
        self._hint(lambda client: client.set(cancel_key(job_id), b"1", ex=CANCEL_TTL_S))

    def find_cancel_hints(self, job_ids: Iterable[str]) -> set[str]:
        """Which of these jobs have such a hint; none while the broker is away. Never raises, never waits
        long."""
        ids = list(job_ids)
        if not ids:
            return set()
        found = self._hint(lambda client: client.mget([cancel_key(job_id) for job_id in ids]))
        return {job_id for job_id, hint in zip(ids, found or (), strict=False) if hint is not None}

    def close(self) -> None:
        """Close the connections; the next message opens new ones."""
        self.client.connection_pool.disconnect()

    def look(self) -> BrokerState:
        """Whether the broker answers and takes messages, and what waits in the job queues. Never raises, never waits
        long."""
        return look_at(self.window, {name: queue_key(name) for name in QUEUES})

    def ping(self) -> None:
        """`BrokerUnavailable` unless the broker answers."""
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
        """The answer, or None while the broker is away, and for a while after that."""
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
