"""Attempts that run alone in a child process, so that a job which kills its process takes no other job with it.

Suspects always do: jobs that lost a worker. After a loss every job does for a while, because the jobs that wait next to
a job which kills its process are often like it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from aijobs.engine.child import Child
from aijobs.engine.child_attempts import ChildAttempts
from aijobs.engine.children import Children
from aijobs.engine.run import Run
from aijobs.queues.message import JobMessage

MOST_WAITING = 1000
"""Messages of suspects kept in memory; the re-drive finds the others."""
ALARM_S = 30.0
"""How long after a loss every job runs in a child."""
CHILD_WAIT_S = 5.0
"""How long a popped message may wait for a child before it is put back."""


class Isolation:
    """The children of one process, and the suspects that wait for one. Usable from any thread."""

    def __init__(self, attempts: ChildAttempts, children: Children) -> None:
        self._attempts, self._children = attempts, children
        self._waiting: OrderedDict[str, tuple[JobMessage, bool]] = OrderedDict()
        self._place = threading.Lock()
        self._alarmed_until = 0.0

    # --- after a loss ----------------------------------------------------------------------------------------------

    def alarm(self) -> None:
        """Run every job in a child from now on, for `ALARM_S` after the last call: a process was lost with its jobs."""
        self._alarmed_until = time.monotonic() + ALARM_S

    @property
    def is_alarmed(self) -> bool:
        """Whether every job runs in a child now."""
        return time.monotonic() < self._alarmed_until

    @contextmanager
    def child(self) -> Iterator[Child | None]:
        """Lend a child to an attempt; None if none is ready in time."""
        with self._lent(self._children.wait(CHILD_WAIT_S)) as child:
            yield child

    # --- suspects --------------------------------------------------------------------------------------------------

    def waits(self, job_id: str) -> bool:
        """Return whether the job's message waits here."""
        return job_id in self._waiting

    def add(self, message: JobMessage, *, fresh: bool) -> None:
        """Queue a suspect's message in memory. If it is lost, the re-drive sends it again.

        `fresh` asks for a child that has run no job: the suspect's last one may have died of what another job left.
        """
        if len(self._waiting) < MOST_WAITING:
            self._waiting[message.job_id] = message, fresh

    @contextmanager
    def suspect(self) -> Iterator[tuple[JobMessage, Child] | tuple[None, None]]:
        """Lend a child to the suspect that has waited longest, and take its message from the queue.

        Yield None twice if another slot runs a suspect, none waits, or no child is ready. Never blocks.
        """
        if not self._place.acquire(blocking=False):
            yield None, None
            return
        try:
            first = next(iter(list(self._waiting.values())), None)  # A copy, because other threads add.
            with self._lent(self._children.take(fresh=first[1]) if first else None) as child:
                yield (self._waiting.popitem(last=False)[1][0], child) if child else (None, None)
        finally:
            self._place.release()

    # --- both ------------------------------------------------------------------------------------------------------

    def run(self, run: Run, child: Child) -> None:
        """Have the child run a locked job, and end the attempt. Never raises."""
        if self._attempts.run(run, child):
            self.alarm()

    def close(self) -> None:
        """Kill the children."""
        self._children.close()

    @contextmanager
    def _lent(self, child: Child | None) -> Iterator[Child | None]:
        try:
            yield child
        finally:
            if child is not None:
                self._children.release(child, eager=self.is_alarmed)
