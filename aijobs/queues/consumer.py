"""Huey's consumer with a polite SIGTERM, quiet outages, and a way to abandon the process."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import redis
from huey.consumer import Consumer, Worker, WorkerRecycle

from aijobs.errors import SettingsError
from aijobs.logs import configure, fault, get_logger, where
from aijobs.queues.beat import BeatScheduler, QuietScheduler
from aijobs.queues.connection import connect, unavailable
from aijobs.queues.crew import Crew
from aijobs.queues.message import PUT_BACK
from aijobs.queues.probe import refuse_unsupported
from aijobs.settings import Settings

EXIT_ABANDONED = 75
"""The exit code of a process that abandons its jobs (EX_TEMPFAIL): its supervisor starts it again."""
ABANDON_LIMIT_S = 10.0
"""Seconds after the grace time for releasing leases, before the process exits anyway."""

logger = get_logger(__name__)


def check_broker(settings: Settings) -> None:
    """Raise `SettingsError` if the broker's URL can't be read, leads to a cluster or a Sentinel, or is that of an
    embedded broker that doesn't run. A configured broker may be away for a while: the consumer waits for it.
    """
    client = connect(settings.broker_url())
    try:
        if settings.redis_url:
            refuse_unsupported(client)
            _warn_of_eviction(client)
        else:
            client.ping()
    except redis.RedisError:
        raise SettingsError(
            f"nobody listens at the address in {settings.instance_path / 'broker.json'}: "
            "start the embedded broker with `aijobs up`, or set AIJOBS_REDIS_URL"
        ) from None
    finally:
        client.close()


def _warn_of_eviction(client: redis.Redis) -> None:
    """Warn if a full broker would drop queues. The re-drive would send the messages again, but late and repeatedly."""
    try:
        policy = str(client.info("memory").get("maxmemory_policy", ""))
    except redis.RedisError:
        return  # Away, or the user has no right to ask.
    if policy.startswith("allkeys"):
        logger.warning("broker.may_evict", policy=policy)


def configure_logs(settings: Settings) -> None:
    """Write JSON lines to stderr, Huey's lines too. `-l FILE` stays."""
    configure(settings.log_level)
    huey_logger = logging.getLogger("huey")
    for handler in list(huey_logger.handlers):
        if type(handler) is logging.StreamHandler:
            huey_logger.removeHandler(handler)


class JobWorker(Worker):
    """A worker thread.

    While broker or database is away it tries again every two seconds at most, without a line each time. With two
    threads or more it runs a waiting suspect first; with one, only if the queue is empty.
    """

    def loop(self, now: Any = None) -> None:
        if self.huey.workers > 1 and self.huey.run_suspect():
            return
        try:
            task = self.huey.dequeue()
        except redis.RedisError as error:
            self.huey.outage.failed(unavailable(self.huey.storage.conn, error))
            self.sleep()
            return
        self.huey.outage.worked()
        if task is None:
            self.delay = self.default_delay
            if not self.stop_flag.is_set():
                self.huey.run_suspect()
            return
        if self.stop_flag.is_set():
            self._put_back()
            return
        if self.huey.execute(task, now) == PUT_BACK:
            # The database is away. Without a pause the whole queue would be popped, dropped and sent again.
            self._put_back()
            self.sleep()
            return
        self.delay = self.default_delay
        self.task_count += 1
        if self.max_tasks and self.task_count >= self.max_tasks:
            raise WorkerRecycle()

    def _put_back(self) -> None:
        """Put the popped message back. If that fails, the re-drive sends it again."""
        try:
            self.huey.storage.put_back()
        except redis.RedisError as error:
            self.huey.outage.failed(unavailable(self.huey.storage.conn, error))


class AiJobsConsumer(Consumer):
    """The consumer of one process."""

    worker_class = JobWorker

    def __init__(self, huey: Any, crew: Crew, **options: Any) -> None:
        self.scheduler_class = BeatScheduler if crew.passes else QuietScheduler
        self._crew = crew
        self._pid = os.getpid()
        self._abandoning = threading.Event()
        super().__init__(huey, **options)
        self._signal_actions.update({signal.SIGTERM: (False, True), signal.SIGINT: (False, True)})

    def start(self) -> None:
        """Install the signal handlers first: a signal while the crew starts must be handled like a later one."""
        self._set_signal_handlers()
        # Loaded modules stay until the end; no collection needs to walk through them again.
        gc.collect()
        gc.freeze()
        self._crew.start()
        self._run_once(self._crew.before_first)
        threading.Thread(target=self._run_once, args=(self._crew.catch_up,), name="catch-up", daemon=True).start()
        super().start()

    def stop(self, graceful: bool = False) -> None:
        """Wait for running jobs for the grace time, then release the rest."""
        super().stop(graceful=graceful)
        self._drain(0.0)

    def abandon(self) -> None:
        """See `AiJobsHuey.abandon`. Runs in a thread of its own, because its caller may be among the threads that it
        waits for.
        """
        if self._abandoning.is_set():
            return
        self._abandoning.set()
        threading.Thread(target=self._give_up, name="abandon", daemon=True).start()

    def _give_up(self) -> None:
        logger.error("consumer.abandoned", queueName=self.huey.queue_name)
        self.stop_flag.set()
        grace_s = float(self.shutdown_timeout or 0)
        drain = threading.Thread(target=self._drain, args=(grace_s,), name="abandon-drain", daemon=True)
        drain.start()
        drain.join(grace_s + ABANDON_LIMIT_S)
        logging.shutdown()
        os._exit(EXIT_ABANDONED)

    def run(self) -> None:
        super().run()
        if self._abandoning.is_set():
            # The main loop saw the stop flag and is done; the thread that gives up ends the process.
            threading.Event().wait()

    def _run_once(self, steps: Sequence[Callable[[], object]]) -> None:
        for step in steps:
            try:
                step()
            except Exception as error:
                logger.error(
                    "consumer.catch_up_failed",
                    queueName=self.huey.queue_name,
                    **fault(error),
                    where=where(error),
                )

    def _drain(self, grace_s: float) -> None:
        try:
            self._crew.drain(grace_s)
        except Exception as error:
            # The next start on this host, or the reaper, finds leases that stay.
            logger.error(
                "consumer.drain_failed",
                queueName=self.huey.queue_name,
                **fault(error),
                where=where(error),
            )

    def _handle_signal(self, signum: int, frame: Any) -> None:
        """Stop at the first signal; Huey would let a second one interrupt.

        A child that a job's code forked inherits this handler, and ends like any process.
        """
        if os.getpid() != self._pid:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if self._signum is None:
            self._signum: int | None = signum
            self._restart, self._graceful = self._signal_actions[signum]
