"""A queue as a Huey instance: signed messages, and nothing else of Huey's in Redis."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

from huey import PriorityRedisHuey
from huey.exceptions import HueyException
from huey.registry import Message
from huey.serializer import Serializer
from huey.storage import PriorityRedisStorage

from aijobs.definitions.definition import QUEUES
from aijobs.errors import AijobsError
from aijobs.logs import Outage, Sparing, fault, get_logger, where
from aijobs.queues.beat import Every
from aijobs.queues.broker import huey_name
from aijobs.queues.codec import TASK, BadMessage, arguments, decode, event_id_of, read_arguments
from aijobs.queues.connection import READ_TIMEOUT_S, connect
from aijobs.queues.consumer import AiJobsConsumer, check_broker, configure_logs
from aijobs.queues.crew import Crew
from aijobs.queues.flags import fit_options
from aijobs.queues.message import JobMessage
from aijobs.settings import Settings

logger = get_logger(__name__)


class MessageSerializer(Serializer):
    """Reads the messages of `RedisBroker`. Writes nothing: a message's bytes come from its outbox row
    (`encode_member`).
    """

    def __init__(self, queue: AiJobsHuey) -> None:
        super().__init__()
        self._queue = queue

    def serialize(self, data: object) -> NoReturn:
        raise AijobsError("nothing is sent through Huey: the outbox is the way to a queue")

    def deserialize(self, data: bytes) -> Message:
        """Return Huey's message for our bytes. `BadMessage` for anything that we didn't sign for this queue."""
        envelope = decode(data, self._queue.settings.message_keys, self._queue.queue_name)
        return Message(
            id=envelope.task_id,
            name=self._queue.job_task_name,
            args=(arguments(envelope.message),),
            kwargs={},
            retries=0,
        )


class QueueStorage(PriorityRedisStorage):
    """Huey's storage, with a pop that distinguishes an empty queue from a broker outage, and that can be undone."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._popped = threading.local()

    def dequeue(self) -> bytes | None:
        """Return the first message without its prefix; None if none came within a second. `RedisError`."""
        popped = self.conn.bzpopmin(self.queue_key, timeout=self.read_timeout)
        if popped is None:
            return None
        _, member, score = popped
        self._popped.last = (member, score)
        return bytes(member[8:])

    def put_back(self) -> None:
        """Undo this thread's last pop: the same member at the same place. `RedisError`."""
        member, score = self._popped.last
        self.conn.zadd(self.queue_key, {member: score}, nx=True)


class AiJobsHuey(PriorityRedisHuey):
    """A queue. It reads the settings and connects when it is first used.

    `build_crew(queue)` is called when a consumer starts. Its `AijobsError` (a setting, the schema, a definition) ends
    the process with that one line.
    """

    def __init__(
        self,
        queue_name: str,
        build_crew: Callable[[AiJobsHuey], Crew],
        *,
        load_settings: Callable[[], Settings] = Settings.load,
    ) -> None:
        self.queue_name = queue_name
        self.job_task_name = ""
        self.workers = QUEUES[queue_name].concurrency if queue_name in QUEUES else 1
        """Number of messages that this process handles at once: the queue's policy, or `-w` of its consumer."""
        self.crew: Crew | None = None
        self.outage = Outage(logger, "broker")
        self._refusals = Sparing()
        self._build_crew, self._load_settings = build_crew, load_settings
        self._abandon: Callable[[], None] | None = None
        self._periods: dict[str, float] = {}
        self._storage: QueueStorage | None = None
        self._making_storage = threading.Lock()
        super().__init__(huey_name(queue_name), results=False, serializer=MessageSerializer(self))

    @cached_property
    def settings(self) -> Settings:
        """Return this process's settings. `SettingsError`."""
        return self._load_settings()

    def create_storage(self) -> None:
        """Create nothing: `storage` does when it is first used."""

    @property
    def storage(self) -> Any:
        """The sorted set in Redis, `huey.redis.aijobs_…`. `SettingsError` if no broker is configured."""
        with self._making_storage:  # Workers that start at once must share one: it remembers each one's last pop.
            if self._storage is None:
                pool = connect(self.settings.broker_url()).connection_pool
                self._storage = QueueStorage(self.name, read_timeout=READ_TIMEOUT_S, connection_pool=pool)
            return self._storage

    @storage.setter
    def storage(self, storage: Any) -> None:
        self._storage = storage

    def add_job_task(self) -> Any:
        """Register the only task of a job queue, `run_job`, which hands each message to the crew."""

        def run_job(message: dict[str, str], *, task: Any) -> object:
            return self._run_job(replace(read_arguments(message), event_id=event_id_of(task.id)))

        run_job.__module__ = self._build_crew.__module__
        self.job_task_name = f"{run_job.__module__}.{TASK}"
        return self.task(name=TASK, context=True)(run_job)

    def add_pass(self, name: str) -> Any:
        """Register a pass of this queue's crew. Its period is known when the crew is built."""

        def run() -> None:
            next(one for one in self._working_crew().passes if one.name == name).run()

        run.__module__ = self._build_crew.__module__
        return self.periodic_task(Every(lambda: self._periods[name]), name=name)(run)

    def gather_crew(self) -> Crew:
        """Build the crew, check that it has all registered passes, and keep it. `SettingsError`."""
        crew = self._build_crew(self)
        self._periods = {one.name: one.every_s for one in crew.passes}
        named = {task.name for task in self._registry.periodic_tasks}
        if named != set(self._periods):
            raise AijobsError(f"{self.queue_name} names passes {sorted(named)}, the crew has {sorted(self._periods)}")
        self.crew = crew
        return crew

    def _run_job(self, message: JobMessage) -> object:
        crew = self._working_crew()
        if crew.run_job is None:
            raise AijobsError(f"{self.queue_name} takes no jobs")
        return crew.run_job(message)

    def run_suspect(self) -> bool:
        """Run one suspect and return whether there was one."""
        return self._working_crew().run_suspect()

    def abandon(self) -> None:
        """Abandon this process, from any thread: release its leases and exit with code 75, so that its supervisor
        starts a new one. Returns at once.
        """
        if self._abandon is None:
            raise AijobsError(f"no consumer of {self.queue_name} runs in this process")
        self._abandon()

    def dequeue(self) -> Any:
        """Return the next task; None if there is none now, or if the message wasn't ours. `RedisError`."""
        data = self.storage.dequeue()
        if self.crew is not None:
            self.crew.asked(data is not None)
        if data is None:
            return None
        try:
            return self.deserialize_task(data)
        except (BadMessage, HueyException) as error:
            # An error would make the worker sleep. If there is a job, the re-drive finds it.
            reason = str(error)
            if (held_back := self._refusals.may_say(reason)) is not None:
                told = {"reason": reason, "bytes": len(data), "alsoRefused": held_back}
                logger.error("message.refused", queueName=self.queue_name, **told)
            return None

    def execute(self, task: Any, timestamp: Any = None) -> object:
        """Run a task and return its result. Without Huey's revocation, schedule, retry, lock or result store, so Redis
        isn't asked.
        """
        try:
            return task.execute()
        except Exception as error:
            logger.error(
                "message.failed",
                queueName=self.queue_name,
                taskId=task.id,
                **fault(error),
                where=where(error),
            )
            return None

    def enqueue(self, task: Any) -> NoReturn:
        raise AijobsError("nothing is sent through Huey: the outbox is the way to a queue")

    def create_consumer(self, **options: Any) -> Any:
        """Return the consumer for `huey_consumer`. Ends the process with one line and code 1 if it can't work."""
        try:
            configure_logs(self.settings)
            passes = bool(self._registry.periodic_tasks)
            fitted = fit_options(options, self.settings, workers=self.workers, passes=passes)
            check_broker(self.settings)
            self.workers = fitted["workers"]
            crew = self.gather_crew()
        except AijobsError as error:
            sys.exit(f"aijobs: {error}")
        consumer = AiJobsConsumer(self, crew, **fitted)
        self._abandon = consumer.abandon
        return consumer

    def _working_crew(self) -> Crew:
        if self.crew is None:
            raise AijobsError(f"no consumer of {self.queue_name} runs in this process")
        return self.crew
