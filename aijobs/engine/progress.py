"""How far an attempt is, written down sparingly: a courtesy that costs an attempt nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from aijobs.engine.failure import DatabaseTrouble
from aijobs.errors import LifecycleError
from aijobs.jobs.lifecycle.statements import ASKED

EVERY_S = 0.5
ANSWERED = 80
"""The work of script or provider fills what lies between `ASKED` and this; saving and projecting are the rest."""


class Progress:
    """Shows the work of one attempt, at most twice a second. Safe to use from any thread; never raises."""

    def __init__(
        self, write: Callable[[int], None], trouble: DatabaseTrouble, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`write(percent)` writes the attempt's progress under its lease."""
        self._write, self._trouble, self._monotonic = write, trouble, monotonic
        self._guard = threading.Lock()
        self._shown, self._shown_at = 0, monotonic()

    def show(self, percent: int) -> None:
        """The work is done to `percent`. Not shown where that is no news, or comes too soon after the last news.

        Work that is done within half a second shows nothing: its end comes as soon.
        """
        reached = ASKED + (ANSWERED - ASKED) * max(0, min(100, int(percent))) // 100
        if not self._guard.acquire(blocking=False):
            return  # Another thread of the attempt is just writing.
        try:
            now = self._monotonic()
            if reached <= self._shown or now - self._shown_at < EVERY_S:
                return
            self._shown, self._shown_at = reached, now
            self._write(reached)
        except LifecycleError:
            self._shown = 100  # The lease is gone: whatever else the attempt does tells it so.
        except Exception as error:
            self._trouble.failed(error)
        else:
            self._trouble.worked()
        finally:
            self._guard.release()
