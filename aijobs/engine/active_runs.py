"""The attempts of this process: what the engine adds, the watcher looks after, and a drain waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from aijobs.db.engines import LOCK_WAIT_S
from aijobs.engine.ending import Ending
from aijobs.engine.outcome import Outcome, Released
from aijobs.engine.run import Run
from aijobs.logs import fault, get_logger

logger = get_logger(__name__)


class Presence(Protocol):
    """Shows what this worker is doing. Its methods don't raise."""

    def started(self, job_id: str) -> None: ...

    def finished(self, job_id: str) -> None: ...


class ActiveRuns:
    """The attempts whose code has not returned. Its methods may be called from any thread."""

    def __init__(self, ending: Ending, presence: Presence) -> None:
        self._ending, self._presence = ending, presence
        self._guard = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._draining = False

    @property
    def is_draining(self) -> bool:
        """Whether this process takes no job any more."""
        return self._draining

    def all(self) -> list[Run]:
        """Return the attempts whose code has not returned."""
        with self._guard:
            return list(self._runs.values())

    def add(self, run: Run) -> bool:
        """Add an attempt that was just locked. Release it and return False if a drain began meanwhile."""
        with self._guard:
            self._runs[run.lease.token] = run
            too_late = self._draining
        if too_late:
            self.release(run)
            self.remove(run)
        return not too_late

    def remove(self, run: Run) -> None:
        """Remove an attempt whose code has returned. If nobody could end it, it is lost."""
        with self._guard:
            self._runs.pop(run.lease.token, None)
        with run.end_lock:  # After another thread that is just ending it.
            run.end(Outcome.LOST)

    @contextmanager
    def shown(self, run: Run) -> Iterator[None]:
        """Show the world that the attempt is running."""
        self._presence.started(run.lease.job_id)
        try:
            yield
        finally:
            self._presence.finished(run.lease.job_id)

    def drain(self, grace_s: float) -> int:
        """Take no new attempts, wait `grace_s` seconds for the others, and release the rest. Return their number."""
        with self._guard:
            self._draining = True
        ends = time.monotonic() + grace_s
        for run in self.all():
            run.ended.wait(max(0.0, ends - time.monotonic()))
        left = [run for run in self.all() if not run.ended.is_set()]
        for run in sorted(left, key=lambda run: run.projecting):  # A projection may have to be waited for.
            self.release(run)
        return len(left)

    def release(self, run: Run) -> None:
        """Release the attempt's lease. An attempt that can't be released keeps it until it runs out. Never raises."""
        try:
            outcome = self._ending.end(run, Released(), wait=LOCK_WAIT_S)
        except Exception as error:
            logger.error("job.release_failed", **fault(error), **run.fields())
        else:
            if outcome is None:
                # If its projection ends in time it is a success. Otherwise its transaction ends with the process.
                logger.error("job.release_failed", error="its projection goes on", **run.fields())
