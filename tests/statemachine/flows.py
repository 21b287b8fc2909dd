"""Several processes in one thread: flows of control that stand still before each commit until they are told to go on.

A flow is a greenlet that runs the product's own code. It stops before each commit, while it waits for a provider, a
lock or an event, and between a lost answer and the reading that settles it. Whoever holds the flows decides which
goes on, with what order, and which never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet

from aijobs.db.clock import ManualClock
from aijobs.engine.run import Run
from tests.support.crash_points import BEFORE_COMMIT

COMMIT, SETTLE, PROVIDER, LOCK, EVENT, BEGINS = "commit", "settle", "provider", "lock", "event", "begins"
"""Why a flow stands still."""


class Died(BaseException):
    """Unwinds a flow whose process ended: nothing it does from here on reaches the world."""


@dataclass
class Process:
    """What lives and dies as a whole."""

    name: str
    alive: bool = True
    flows: list[Flow] = field(default_factory=list)

    def die(self) -> None:
        """End it as SIGKILL does: none of its flows does anything any more."""
        self.alive = False
        for flow in self.flows:
            flow.cut()

    def standing(self) -> list[Flow]:
        """Its flows that are not over."""
        return [flow for flow in self.flows if not flow.dead]


class Flow(greenlet):
    """One flow of control of a process; made in the thread's main flow, or by another flow of the process."""

    def __init__(self, process: Process, name: str, work: Callable[[], Any], hub: greenlet) -> None:
        super().__init__(self._work_off, parent=hub)
        self.process, self.name, self.hub = process, name, hub
        self.why, self.waits_for = BEGINS, lambda: True
        self.attempt: Run | None = None
        self.result: Any = None
        self.error: Exception | None = None
        self.away_for = 0
        """How many more commits of this flow find no database."""
        self.may_fail = False
        """The database was away for it, and it may say so."""
        self._work, self._began = work, False
        process.flows.append(self)

    def _work_off(self, _order: Any = None) -> None:
        self._began = True
        try:
            self.result = self._work()
        except Died:
            self.why = "died"
        except Exception as error:
            self.error = error

    def go(self, order: str | None = None) -> None:
        """Go on to the next stop, or to the end."""
        self.switch(order)
        if not self.process.alive:
            self.process.die()

    def cut(self) -> None:
        """Never go on."""
        if self.dead:
            return
        self.why = "died"
        # What never began has nothing to unwind, and would hand `Died` to whoever cuts it.
        self.throw(Died if self._began else GreenletExit)

    def rest(self, why: str, waits_for: Callable[[], bool] = lambda: True) -> str | None:
        """Stand still; the order with which the flow was sent on."""
        self._ensure_alive()
        self.why, self.waits_for = why, waits_for
        order = self.hub.switch()
        self._ensure_alive()
        if order == BEFORE_COMMIT:  # It ends where it stands.
            self.process.alive = False
            raise Died
        return order

    @property
    def can_go(self) -> bool:
        """Whether what it waits for is there."""
        return not self.dead and self.waits_for()

    def _ensure_alive(self) -> None:
        if not self.process.alive:
            raise Died


def this_flow() -> Flow | None:
    """The flow that runs now; None for the test itself."""
    current = getcurrent()
    return current if isinstance(current, Flow) else None


def stop(why: str, waits_for: Callable[[], bool] = lambda: True) -> str | None:
    """Have the flow that runs stand still; nothing happens to the test itself."""
    flow = this_flow()
    return flow.rest(why, waits_for) if flow is not None else None


# --- what stands in for `threading` and `time` in the product --------------------------------------------------------


class FlowLock:
    """A reentrant lock between flows."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """`timeout` is for threads: here whoever holds the lock goes on in the end, or its process dies."""
        me = getcurrent()
        while not self._is_free() and self._owner is not me:
            if not blocking or timeout == 0:
                return False
            stop(LOCK, self._is_free)
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None

    def _is_free(self) -> bool:
        return self._owner is None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class FlowEvent:
    """An event between flows."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        while not self._set and timeout != 0.0:
            stop(EVENT, self.is_set)
        return self._set


class FlowThread:
    """A thread of the product becomes a flow of the process that starts it."""

    def __init__(self, *, target: Callable[..., Any], args: tuple[Any, ...], name: str, daemon: bool) -> None:
        self._target, self._args, self._name = target, args, name

    def start(self) -> None:
        starter = this_flow()
        assert starter is not None, "a thread started by no flow"
        flow = Flow(starter.process, self._name, lambda: self._target(*self._args), starter.hub)
        flow.attempt = next((one for one in self._args if isinstance(one, Run)), None)


class FlowThreading:
    """What `aijobs.engine.engine` sees as `threading`."""

    Thread = FlowThread
    Lock = FlowLock
    Event = FlowEvent


class VirtualTime:
    """What the product sees as `time`: it goes as the manual clock goes, and nobody sleeps."""

    def __init__(self, clock: ManualClock, begin: datetime) -> None:
        self._clock, self._begin = clock, begin

    def monotonic(self) -> float:
        return 1000 + (self._clock.at - self._begin).total_seconds()

    def sleep(self, _seconds: float) -> None:
        """The pause before a unit of work is repeated: others may act meanwhile."""
        flow = this_flow()
        if flow is not None and not flow.away_for:
            flow.rest(SETTLE)


TIMED = ("aijobs.db.database", "aijobs.engine.token", "aijobs.engine.watcher", "aijobs.engine.active_runs")
TIMED_PASSES = ("aijobs.upkeep.dispatcher",)


@contextmanager
def one_thread(time: VirtualTime) -> Iterator[None]:
    """The product's modules with flows for threads and the manual clock for time."""
    patches: list[Any] = [mock.patch(f"{module}.time", time) for module in (*TIMED, *TIMED_PASSES)]
    patches.append(mock.patch("aijobs.engine.engine.threading", FlowThreading))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
