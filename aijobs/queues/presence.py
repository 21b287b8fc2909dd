"""The running consumer processes: each writes to Redis every 15 seconds that it lives, and what it runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import redis
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.alias_generators import to_camel

from aijobs.clock import iso, utc_now
from aijobs.ids import InstanceId
from aijobs.logs import Outage, get_logger
from aijobs.queues.connection import ImpatientClient, unavailable
from aijobs.reading import read_json, warn_unreadable

HEARTBEAT_PREFIX = "worker:heartbeat:"
TTL_S = 90
BEAT_S = 15.0
GATHER_S = 0.2
"""Starts and ends within this time are written together, because two writes for each quick job would be too many."""
SCAN_COUNT = 500

MOST_JOBS = 10_000
"""Maximum jobs of one process. A heartbeat with more isn't ours."""
_Name = Annotated[str, Field(max_length=300)]
_Milliseconds = Annotated[int, Field(ge=0, le=10**12)] | None

logger = get_logger(__name__)


class Presence:
    """The heartbeat of one process. Thread-safe.

    Never raises on an error of Redis, and never makes a job wait for it: a thread of its own writes, soon after a job's
    start or end and every `beat_s` seconds.
    """

    def __init__(
        self,
        client: redis.Redis,
        instance: InstanceId,
        queue_name: str,
        *,
        slots: int | None = None,
        beat_s: float = BEAT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots`: number of jobs that this process runs at once; None if it runs no jobs."""
        self._client, self._instance, self._queue_name, self._beat_s = client, instance, queue_name, beat_s
        self._slots, self._monotonic = slots, monotonic
        self._key = f"{HEARTBEAT_PREFIX}{instance}"
        self._started_at = iso(utc_now())
        self._guard = threading.Lock()
        self._active: list[str] = []
        self._popped_at: float | None = None
        self._asked_at = monotonic()
        self._changed = threading.Event()
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self._outage = Outage(logger, "broker.presence")

    def start(self) -> None:
        """Write heartbeats until `leave`."""
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    def started(self, job_id: str) -> None:
        """Record that a job begins here."""
        with self._guard:
            self._active.append(job_id)
        self._changed.set()

    def finished(self, job_id: str) -> None:
        """Record that a job has ended here, or was released."""
        self._asked_at = self._monotonic()  # Until now its thread couldn't ask.
        with self._guard:
            if job_id in self._active:
                self._active.remove(job_id)
        self._changed.set()

    def asked(self, popped: bool) -> None:
        """Record that the queue answered a worker. `popped`: with a message."""
        self._asked_at = self._monotonic()
        if popped:
            self._popped_at = self._asked_at

    def beat(self) -> None:
        """Write the heartbeat now."""
        self._try(self._client.set, self._key, self._card(), ex=TTL_S)

    def leave(self) -> None:
        """Stop, and delete the heartbeat."""
        self._left.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(timeout=self._beat_s)
        self._try(self._client.delete, self._key)

    def _run(self) -> None:
        while not self._left.is_set():
            self.beat()
            if self._changed.wait(self._beat_s):
                self._left.wait(GATHER_S)
            self._changed.clear()

    def _card(self) -> str:
        with self._guard:
            active = list(self._active)
        now, popped_at = self._monotonic(), self._popped_at
        return json.dumps(
            {
                "instanceId": str(self._instance),
                "queue": self._queue_name,
                "host": self._instance.host,
                "pid": self._instance.pid,
                "startedAt": self._started_at,
                "slots": self._slots,
                "activeJobCount": len(active),
                "activeJobIds": active,
                "lastAskedMs": _ms(now - self._asked_at),
                "lastPopMs": None if popped_at is None else _ms(now - popped_at),
            }
        )

    def _try(self, command: Any, *args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except redis.RedisError as error:
            self._outage.failed(unavailable(self._client, error))
        else:
            self._outage.worked()


@dataclass(frozen=True)
class WorkerPresence:
    """A worker process, by its last heartbeat."""

    instance_id: str
    queue: str
    host: str
    pid: int
    started_at: datetime
    active_job_count: int
    active_job_ids: tuple[str, ...]
    slots: int | None
    """Number of jobs that it runs at once; None if it runs no jobs, or doesn't say."""
    age_s: float
    """Seconds since that heartbeat, by Redis's clock."""
    asked_s: float | None = None
    """Seconds since its queue last answered it, or a job ended; None if unknown."""
    popped_s: float | None = None
    """Seconds since it last took a message; None if it took none."""


class PresenceReader:
    """Reads the running workers. An entry expires 90 s after its process's last heartbeat."""

    def __init__(self, client: ImpatientClient) -> None:
        self._client = client

    def read(self) -> list[WorkerPresence]:
        """Return all workers, ordered by queue, host and pid. `BrokerUnavailable`."""
        answers = self._client.ask(_read_all)
        found = [_read(card, ttl_ms) for card, ttl_ms in zip(answers[::2], answers[1::2], strict=True)]
        return sorted((p for p in found if p is not None), key=lambda p: (p.queue, p.host, p.pid))


class _Card(BaseModel):
    """A stored heartbeat."""

    model_config = ConfigDict(alias_generator=to_camel)

    instance_id: _Name
    queue: _Name
    host: _Name
    pid: Annotated[int, Field(ge=1, lt=2**31)]
    started_at: Annotated[
        AwareDatetime, Field(ge=datetime(2000, 1, 1, tzinfo=UTC), lt=datetime(9000, 1, 1, tzinfo=UTC))
    ]
    active_job_count: Annotated[int, Field(ge=0, le=MOST_JOBS)]
    active_job_ids: Annotated[tuple[_Name, ...], Field(max_length=MOST_JOBS)]
    slots: Annotated[int, Field(ge=1, le=MOST_JOBS)] | None = None
    last_asked_ms: _Milliseconds = None
    last_pop_ms: _Milliseconds = None


_SHAPE = TypeAdapter(_Card)


def _read_all(client: redis.Redis) -> list[Any]:
    """Return each heartbeat and its remaining time."""
    keys = sorted(set(client.scan_iter(match=f"{HEARTBEAT_PREFIX}*", count=SCAN_COUNT)))
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.get(key)
        pipeline.pttl(key)
    answers: list[Any] = pipeline.execute(raise_on_error=False) if keys else []
    for answer in answers:
        if isinstance(answer, redis.RedisError) and "WRONGTYPE" not in str(answer):
            raise answer
    return answers


def _read(card: Any, ttl_ms: Any) -> WorkerPresence | None:
    """Return the worker; None for an entry that expired between two reads, or that isn't ours."""
    if card is None or ttl_ms == -2:
        return None
    if not isinstance(card, bytes) or not isinstance(ttl_ms, int) or ttl_ms < 0:
        warn_unreadable("heartbeat")
        return None
    found = read_json("heartbeat", card, _SHAPE)
    if found is None:
        return None
    age_s = max(0.0, TTL_S - ttl_ms / 1000)
    return WorkerPresence(
        instance_id=found.instance_id,
        queue=found.queue,
        host=found.host,
        pid=found.pid,
        started_at=found.started_at.astimezone(UTC),
        active_job_count=found.active_job_count,
        active_job_ids=found.active_job_ids,
        slots=found.slots,
        age_s=age_s,
        asked_s=None if found.last_asked_ms is None else age_s + found.last_asked_ms / 1000,
        popped_s=None if found.last_pop_ms is None else age_s + found.last_pop_ms / 1000,
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
