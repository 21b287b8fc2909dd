"""Who is at work: each consumer process says so in Redis every 15 seconds, and what it runs."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import redis

from aijobs.clock import iso, parse_iso, utc_now
from aijobs.ids import InstanceId
from aijobs.logs import Outage, get_logger
from aijobs.queues.connection import unavailable

HEARTBEAT_PREFIX = "worker:heartbeat:"
TTL_S = 90
BEAT_S = 15.0
GATHER_S = 0.2
"""Starts and ends that come within so long are told at once: of quick jobs each would otherwise cost two writes."""
SCAN_COUNT = 500

logger = get_logger(__name__)


class Presence:
    """One process's heartbeat. Thread-safe; never raises on trouble with Redis, and never makes a job wait
    for it: a thread of its own writes, soon after a job's start or end and every `beat_s` seconds."""

    def __init__(
        self,
        client: redis.Redis,
        instance: InstanceId,
        queue_name: str,
        *,
        slots: int | None = None,
        beat_s: float = BEAT_S,
    ) -> None:
        """`slots`: how many jobs this process runs at once; None for one that runs none."""
        self._client, self._instance, self._queue_name, self._beat_s = client, instance, queue_name, beat_s
        self._slots = slots
        self._key = f"{HEARTBEAT_PREFIX}{instance}"
        self._started_at = iso(utc_now())
        self._guard = threading.Lock()
        self._active: list[str] = []
        self._changed = threading.Event()
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self._outage = Outage(logger, "broker.presence")

    def start(self) -> None:
        """Say hello, and go on saying so until `leave`."""
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    def started(self, job_id: str) -> None:
        """A job begins here."""
        with self._guard:
            self._active.append(job_id)
        self._changed.set()

    def finished(self, job_id: str) -> None:
        """A job has ended here, or was given back."""
        with self._guard:
            if job_id in self._active:
                self._active.remove(job_id)
        self._changed.set()

    def beat(self) -> None:
        """Write the heartbeat now."""
        self._try(self._client.set, self._key, self._card(), ex=TTL_S)

    def leave(self) -> None:
        """Stop, and take the heartbeat away."""
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
            }
        )

    def _try(self, command: Any, *args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except redis.RedisError as error:
            unavailable(self._client, error)
            self._outage.failed(error)
        else:
            self._outage.worked()


@dataclass(frozen=True)
class WorkerPresence:
    """A worker process as its last heartbeat tells it."""

    instance_id: str
    queue: str
    host: str
    pid: int
    started_at: datetime
    active_job_count: int
    active_job_ids: tuple[str, ...]
    slots: int | None
    """How many jobs it runs at once; None for one that runs none, or doesn't say."""
    age_s: float
    """Since that heartbeat, by Redis's clock: a worker's wrong clock changes nothing."""


class PresenceReader:
    """Reads who is at work. An entry goes 90 s after its process's last sign of life."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def read(self) -> list[WorkerPresence]:
        """All workers, by queue, host and pid. `BrokerUnavailable`."""
        try:
            keys = sorted(set(self._client.scan_iter(match=f"{HEARTBEAT_PREFIX}*", count=SCAN_COUNT)))
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.get(key)
                pipeline.pttl(key)
            answers = pipeline.execute() if keys else []
        except redis.RedisError as error:
            raise unavailable(self._client, error) from error
        found = [_read(card, ttl_ms) for card, ttl_ms in zip(answers[::2], answers[1::2], strict=True)]
        return sorted((p for p in found if p is not None), key=lambda p: (p.queue, p.host, p.pid))


def _read(card: bytes | None, ttl_ms: int) -> WorkerPresence | None:
    """None for an entry that went between two reads, and for one that nobody of ours wrote."""
    if card is None or ttl_ms < 0:
        return None
    try:
        fields = json.loads(card)
        return WorkerPresence(
            instance_id=str(fields["instanceId"]),
            queue=str(fields["queue"]),
            host=str(fields["host"]),
            pid=int(fields["pid"]),
            started_at=parse_iso(fields["startedAt"]),
            active_job_count=int(fields["activeJobCount"]),
            active_job_ids=tuple(str(job_id) for job_id in fields["activeJobIds"]),
            slots=_slots(fields.get("slots")),
            age_s=max(0.0, TTL_S - ttl_ms / 1000),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _slots(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 1_000_000 else None
