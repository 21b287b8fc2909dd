"""Named points at which a process ends itself at once, as in a power cut, if the driver has armed them.

The driver arms a point with a file of its name, which contains the number of passes before the crash. The first process
that reaches the point deletes the file and counts down, so one file ends one process. The product has no such code: the
`install_…` functions wrap its methods in the processes of a chaos run.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from tests.chaos.ledger import append
from tests.support.crash_points import AFTER_COMMIT, BEFORE_COMMIT

EXIT_CODE = 137


def commits_of(role: str) -> tuple[str, str]:
    """Return the points before and after each COMMIT of a process with this role."""
    return f"{role}_{BEFORE_COMMIT}", f"{role}_{AFTER_COMMIT}"


WORKER_POINTS = (
    "before_lock",
    "after_lock",
    "before_call",
    "after_answer",
    "before_project",
    "in_projector",
    *commits_of("worker"),
)
MAINTENANCE_POINTS = (
    "after_claim",
    "after_send",
    "before_mark",
    "after_expire",
    *commits_of("maintenance"),
)
WEB_POINTS = commits_of("web")
POINTS = WORKER_POINTS + MAINTENANCE_POINTS + WEB_POINTS
STOP_POINTS = ("between_answer_and_save", "between_save_and_projection")
"""Points at which a worker can be suspended instead: between two writes, with no open transaction."""
CRASHES, STOPS = "crashes", "stops"
"""The files with a line for each process that ended or was suspended at a point."""


class CrashPoints:
    """The crash points of this process."""

    def __init__(self, folder: Path, name: str) -> None:
        """`folder` contains the armed points and the record of crashes; `name` is the process's name."""
        self._folder, self._name = folder, name
        self._guard = threading.Lock()
        self._left: dict[str, int] = {}
        self._stops: dict[str, float] = {}
        """Points at which to suspend instead, with the latest time for it."""

    def reach(self, point: str) -> None:
        """End or suspend the process here if the point is armed."""
        with self._guard:
            if point not in self._left and not self._take(point):
                return
            self._left[point] -= 1
            if self._left[point] >= 0:
                return
            until = self._stops.get(point)
            if until is not None:
                del self._left[point]
        stop = until is not None
        if until is not None and time.time() > until:
            return  # Too late: the driver wouldn't resume the process any more.
        append(self._folder / (STOPS if stop else CRASHES), point=point, process=self._name)
        if not stop:
            os._exit(EXIT_CODE)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _take(self, point: str) -> bool:
        armed = self._folder / point
        try:
            count, _, until = armed.read_text().partition(" ")
            armed.unlink()
        except FileNotFoundError:
            return False
        self._left[point] = int(count)
        self._stops.pop(point, None)
        if until:
            self._stops[point] = float(until)
        return True


def arm(folder: Path, point: str, passages: int, *, stop_within_s: float | None = None) -> None:
    """Make the next process that reaches `point` end there, after `passages` passes.

    With `stop_within_s` it is suspended instead, if it reaches the point within that time.
    """
    draft = folder / f".{point}"
    draft.write_text(str(passages) if stop_within_s is None else f"{passages} {time.time() + stop_within_s}")
    draft.rename(folder / point)


def disarm(folder: Path) -> None:
    """Disarm all points that no process has taken."""
    for point in (*POINTS, *STOP_POINTS):
        (folder / point).unlink(missing_ok=True)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(original, *arguments)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def before(points: CrashPoints, point: str) -> Callable[..., Any]:
    """Return a wrapper that reaches `point` before the call."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        points.reach(point)
        return original(*args, **kwargs)

    return call


def after(points: CrashPoints, point: str) -> Callable[..., Any]:
    """Return a wrapper that reaches `point` after the call has returned."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        points.reach(point)
        return result

    return call


def install_commits(points: CrashPoints, role: str) -> None:
    """Install the points before and after each COMMIT of this process."""
    before_commit, after_commit = commits_of(role)
    event.listen(Session, "before_commit", lambda _session: points.reach(before_commit))
    event.listen(Session, "after_commit", lambda _session: points.reach(after_commit))


def install_maintenance(points: CrashPoints) -> None:
    """Install the points of dispatcher and reaper."""
    from aijobs.jobs.lifecycle.repository import LifecycleRepository
    from aijobs.outbox.repository import OutboxRepository
    from aijobs.queues.broker import RedisBroker

    claimed = threading.local()

    def claim(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        claimed.events = original(*args, **kwargs)
        return claimed.events

    def send(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The claim is committed by now. The re-drive sends without a claim.
        if getattr(claimed, "events", None):
            points.reach("after_claim")
            claimed.events = None
        failures = original(*args, **kwargs)
        points.reach("after_send")
        return failures

    wrap(OutboxRepository, "claim", claim)
    wrap(RedisBroker, "send", send)
    wrap(OutboxRepository, "mark_published", before(points, "before_mark"))
    wrap(LifecycleRepository, "expire", after(points, "after_expire"))


def install_worker(points: CrashPoints) -> None:
    """Install the points of an attempt."""
    from aijobs.engine.project import Project
    from aijobs.job_types.flashcard_generation import FlashcardProjector
    from aijobs.jobs.lifecycle.repository import LifecycleRepository
    from tests.chaos.chaos_job import ItemProjector

    wrap(LifecycleRepository, "lock_job", before(points, "before_lock"))
    wrap(LifecycleRepository, "lock_job", after(points, "after_lock"))
    wrap(Project, "project", before(points, "before_project"))
    wrap(Project, "project", before(points, "between_save_and_projection"))
    for projector in (FlashcardProjector, ItemProjector):
        wrap(projector, "project", after(points, "in_projector"))
