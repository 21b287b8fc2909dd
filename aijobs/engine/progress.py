"""The progress of an attempt, written at most twice a second. Best effort."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from aijobs.engine.failure import ErrorLog
from aijobs.jobs.errors import LifecycleError
from aijobs.jobs.lifecycle.statements import ASKED

EVERY_S = 0.5
ANSWERED = 80
"""The work of script or provider goes from `ASKED` to this; saving and projecting are the rest."""


class Progress:
    """Shows the work of one attempt, at most twice a second. Safe to use from any thread; never raises."""

    def __init__(
        self, write: Callable[[int], None], error_log: ErrorLog, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`write(percent)` writes the attempt's progress under its lease."""
        self._write, self._error_log, self._monotonic = write, error_log, monotonic
        self._guard = threading.Lock()
        self._shown, self._shown_at = 0, monotonic()

    def show(self, percent: int) -> None:
        """Show that the work is done to `percent`, unless that is no news or comes too soon after the last.

        Work that takes less than half a second shows nothing.
        """
        reached = ASKED + (ANSWERED - ASKED) * max(0, min(100, int(percent))) // 100
        if not self._guard.acquire(blocking=False):
            return  # Another thread of the attempt is writing.
        try:
            now = self._monotonic()
            if reached <= self._shown or now - self._shown_at < EVERY_S:
                return
            self._shown, self._shown_at = reached, now
            self._write(reached)
        except LifecycleError:
            self._shown = 100  # The lease is lost, which the attempt's next write will find out.
        except Exception as error:
            self._error_log.failed(error)
        else:
            self._error_log.worked()
        finally:
            self._guard.release()
