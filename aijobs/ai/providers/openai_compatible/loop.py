"""One event loop in a thread of its own, shared by all calls of a process.

Calls are asynchronous because only such a one can be ended from another thread: a synchronous client that is closed
from there leaves its blocked read blocked.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Started by its first call; a daemon, so that it holds up no process that ends."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` there. Cancelling the future ends it within the loop's next turn."""
        return asyncio.run_coroutine_threadsafe(work, self._running())

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._guard:
            if self._loop is None or self._pid != os.getpid():  # A fork has the loop, and not the thread that ran it.
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name="provider-calls", daemon=True).start()
            return self._loop
