"""How an attempt learns that it must stop: cancelled, out of time, or its lease is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from aijobs.errors import JobError

CANCELLED = "CANCELLED"
TIMEOUT = "TIMEOUT"
LOST = "LOCK_LOST"
"""Not an error of the job: another attempt holds it, and this one writes nothing."""
RELEASED = "RELEASED"
"""Not an error of the job: the worker stops, and has released its lease."""


class CancellationToken:
    """One attempt's deadline and its reason to stop. Safe to use from any thread."""

    def __init__(self, seconds: float, show: Callable[[int], None] = lambda percent: None) -> None:
        """The deadline is `seconds` from now. `show` gets the progress in percent; it doesn't raise."""
        self._show = show
        self._deadline = time.monotonic() + seconds
        self._event = threading.Event()
        self._guard = threading.Lock()
        self._reason: str | None = None
        self._callbacks: list[Callable[[], object]] = []

    @property
    def reason(self) -> str | None:
        """Why the attempt must stop; None if it may go on."""
        if self._reason is None and self.remaining() <= 0:
            return TIMEOUT
        return self._reason

    @property
    def cancelled(self) -> bool:
        """Whether the attempt must stop."""
        return self.reason is not None

    def remaining(self) -> float:
        """Seconds until the deadline, never below 0."""
        return max(0.0, self._deadline - time.monotonic())

    def cancel(self, reason: str) -> None:
        """Make the attempt stop. The first reason counts."""
        with self._guard:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, []
        self._event.set()
        for callback in callbacks:
            callback()

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the attempt must stop, at once if it must already. Used to abort a call in flight."""
        with self._guard:
            if self._reason is None:
                self._callbacks.append(callback)
                return
        callback()

    def raise_if_cancelled(self) -> None:
        """Raise `JobError` with the reason as its code if the attempt must stop."""
        if (reason := self.reason) is not None:
            raise JobError(reason, "the attempt was stopped")

    def progress(self, percent: int) -> None:
        """Report that the work is done to `percent` (0–100). It is shown twice a second at most."""
        if not self.cancelled:
            self._show(percent)

    def sleep(self, seconds: float) -> None:
        """Sleep, or raise `JobError` as soon as the attempt must stop."""
        ends = time.monotonic() + seconds
        while (left := min(ends - time.monotonic(), self.remaining())) > 0:
            if self._event.wait(left):
                break
        self.raise_if_cancelled()
