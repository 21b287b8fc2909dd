"""The maintenance queue's scheduler: it runs the periodic tasks itself, even while Redis is away.

Huey's scheduler sends a periodic task through Redis and reads its schedule from there, so it stops when Redis does.
This one asks Redis for nothing. Each due pass gets a thread; it is skipped while the one before still runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from huey.consumer import Scheduler

from aijobs.logs import Sparing, fault, get_logger, where

SLACK_S = 0.25
"""How early a beat counts as on time: a scheduler that wakes a little early must not lose a whole beat."""
LOG_EVERY_S = 60.0

logger = get_logger(__name__)


class Every:
    """The schedule of a periodic task: due at once, then every `period_s()` seconds. Missed beats are dropped."""

    def __init__(self, period_s: Callable[[], float], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._period_s, self._monotonic = period_s, monotonic
        self._due: float | None = None

    def __call__(self, _timestamp: object) -> bool:
        now = self._monotonic()
        if self._due is not None and now + SLACK_S < self._due:
            return False
        beat = self._due if self._due is not None else now
        following = beat + self._period_s()
        self._due = following if following > now else now + self._period_s()
        return True


class FailureLog:
    """Writes one line a minute for each pass and kind of error."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._sparing = Sparing(LOG_EVERY_S, monotonic)

    def failed(self, name: str, error: BaseException) -> None:
        """Record that a pass raised `error`."""
        kind = (name, type(error).__name__)
        held_back = self._sparing.may_say(kind)
        if held_back is not None:
            logger.error("pass.failed", **{"pass": name}, **fault(error), alsoFailed=held_back, where=where(error))


class QuietScheduler(Scheduler):
    """The scheduler of the job queues. It does nothing: their delays are in the outbox."""

    def loop(self, now: Any = None) -> None:
        self.stop_flag.wait(self.interval)


class BeatScheduler(Scheduler):
    """Starts the periodic tasks that are due, each second."""

    periodic_task_seconds = 1
    stop_wait_s = 10.0
    """Maximum wait for running passes when the process stops."""

    def __init__(self, huey: Any, stop_flag: threading.Event, interval: int, periodic: bool) -> None:
        super().__init__(huey, stop_flag, 1, periodic)
        self._running: dict[str, threading.Thread] = {}
        self._failures = FailureLog()

    def loop(self, now: Any = None) -> None:
        started = time.monotonic()
        if self.periodic:
            for task in self.huey.read_periodic(now):
                self._run(task)
        self.sleep_for_interval(started, self.periodic_task_seconds)

    def shutdown(self) -> None:
        """Wait for running passes. A longer one is cut off by the process's end, which is harmless."""
        until = time.monotonic() + self.stop_wait_s
        for thread in list(self._running.values()):
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, task: Any) -> None:
        predecessor = self._running.get(task.name)
        if predecessor is not None and predecessor.is_alive():
            return
        thread = threading.Thread(target=self._execute, args=(task,), name=f"pass-{task.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # No thread can be started; the next beat tries again.
            self._failures.failed(task.name, error)
        else:
            self._running[task.name] = thread

    def _execute(self, task: Any) -> None:
        # `task.execute`, because `huey.execute` asks Redis for revocations first.
        try:
            task.execute()
        except Exception as error:
            self._failures.failed(task.name, error)
