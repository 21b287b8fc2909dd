"""One event loop in a thread of its own, shared by all calls of a process.

Calls are asynchronous because another thread can end them. A synchronous client that is closed from another thread
leaves its read blocked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from aijobs.forks import leave_behind, new_lock, renew_in_child

T = TypeVar("T")


class LoopThread:
    """A thread with an event loop, started by its first call. A daemon, so that it doesn't keep the process alive. The
    child of a fork starts its own.
    """

    def __init__(self) -> None:
        self._guard = new_lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        renew_in_child(self, LoopThread._forget)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the loop. Cancelling the future ends it at the loop's next step."""
        return asyncio.run_coroutine_threadsafe(work, self._running())

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._guard:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="provider-calls", daemon=True).start()
            return self._loop

    def _forget(self) -> None:
        leave_behind(self._loop)
        self._loop = None
