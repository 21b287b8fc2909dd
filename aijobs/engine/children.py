"""The child processes of one worker process, kept for attempts that run alone."""

from __future__ import annotations

import math
import threading
import time

from aijobs.engine.child import Child
from aijobs.logs import get_logger

logger = get_logger(__name__)

START_LIMIT_S = 60.0
"""A child that isn't ready by then is replaced."""
START_PAUSE_S = 10.0
"""The wait after a start that failed."""
POLL_S = 0.05
MOST = 2
"""Children of one process at a time: each takes as much memory as the process."""


class Children:
    """Starts children, lends each to one attempt at a time, and replaces those that died. Usable from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._idle: list[Child] = []
        """Ready or starting."""
        self._lent: list[Child] = []
        self._wanted = 0
        """Threads that wait for a child."""
        self._start_after = 0.0

    def take(self, *, fresh: bool = False) -> Child | None:
        """Return a child that is ready, or None if it is still starting. `fresh`: one that has run no attempt."""
        with self._guard:
            for child in list(self._idle):
                if child.is_gone or (fresh and not child.is_fresh) or not self._starts_in_time(child):
                    self._drop(child)
                elif child.is_ready:
                    self._idle.remove(child)
                    self._lent.append(child)
                    return child
            most = min(MOST - len(self._lent), max(1, self._wanted))
            while len(self._idle) < most and time.monotonic() >= self._start_after:
                self._start()
            return None

    def wait(self, seconds: float) -> Child | None:
        """Return a child that is ready, waiting up to `seconds` for it; None if there was none."""
        ends = time.monotonic() + seconds
        with self._guard:
            self._wanted += 1
        try:
            while (child := self.take()) is None and time.monotonic() < ends:
                time.sleep(POLL_S)
            return child
        finally:
            with self._guard:
                self._wanted -= 1

    def release(self, child: Child, *, eager: bool) -> None:
        """Return a child to the pool after an attempt. Keep one; if `eager`, keep all and replace a dead one."""
        with self._guard:
            self._lent.remove(child)
            if not child.is_gone and (eager or not self._idle):
                self._idle.append(child)
                return
            child.kill()
            if eager and time.monotonic() >= self._start_after:
                self._start()

    def close(self) -> None:
        """Kill all children, and start none any more."""
        with self._guard:
            self._start_after = math.inf
            for child in (*self._idle, *self._lent):
                child.kill()
            self._idle.clear()

    def _start(self) -> None:
        try:
            child = Child()
        except OSError as error:
            self._start_failed(str(error))
        else:
            self._idle.append(child)
            logger.info("suspects.child_started", pid=child.pid)

    def _starts_in_time(self, child: Child) -> bool:
        return child.is_ready or time.monotonic() - child.started_at < START_LIMIT_S

    def _drop(self, child: Child) -> None:
        self._idle.remove(child)
        child.kill()
        if not child.is_ready:
            self._start_failed("it was not ready in time, or ended before")

    def _start_failed(self, why: str) -> None:
        self._start_after = max(self._start_after, time.monotonic() + START_PAUSE_S)
        logger.error("suspects.child_failed", error=why)
