"""Several simulated processes in one thread: flows of control that stop before each commit.

A flow is a greenlet that runs product code. It stops before each commit, while it waits for a provider, a lock or an
event, and between a lost COMMIT answer and the read that confirms it. The test decides which flow continues, with what
order, and which one never does.
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

COMMIT, CONFIRM, PROVIDER, LOCK, EVENT, BEGINS = "commit", "confirm", "provider", "lock", "event", "begins"
"""Why a flow has stopped."""


class Died(BaseException):
    """Unwinds a flow whose process ended, so that it changes nothing more."""


@dataclass
class Process:
    """A simulated process: its flows live and die together."""

    name: str
    alive: bool = True
    flows: list[Flow] = field(default_factory=list)

    def die(self) -> None:
        """End it as SIGKILL does: no flow of it continues."""
        self.alive = False
        for flow in self.flows:
            flow.cut()

    def live_flows(self) -> list[Flow]:
        """Return the flows that have not ended."""
        return [flow for flow in self.flows if not flow.dead]


class Flow(greenlet):
    """One flow of control of a process, created by the test or by another flow of the process."""

    def __init__(self, process: Process, name: str, work: Callable[[], Any], hub: greenlet) -> None:
        super().__init__(self._work_off, parent=hub)
        self.process, self.name, self.hub = process, name, hub
        self.why, self.waits_for = BEGINS, lambda: True
        self.attempt: Run | None = None
        self.result: Any = None
        self.error: Exception | None = None
        self.away_for = 0
        """The number of further commits of this flow that find no database."""
        self.may_fail = False
        """The database was unreachable for this flow, so it may raise a database error."""
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
        """Continue to the next stop, or to the end."""
        self.switch(order)
        if not self.process.alive:
            self.process.die()

    def cut(self) -> None:
        """End the flow where it stands."""
        if self.dead:
            return
        self.why = "died"
        # A flow that never began has nothing to unwind and would raise `Died` in the caller.
        self.throw(Died if self._began else GreenletExit)

    def rest(self, why: str, waits_for: Callable[[], bool] = lambda: True) -> str | None:
        """Stop here. Return the order with which the flow continues."""
        self._ensure_alive()
        self.why, self.waits_for = why, waits_for
        order = self.hub.switch()
        self._ensure_alive()
        if order == BEFORE_COMMIT:  # The process ends here.
            self.process.alive = False
            raise Died
        return order

    @property
    def can_go(self) -> bool:
        """Return whether the flow can continue."""
        return not self.dead and self.waits_for()

    def _ensure_alive(self) -> None:
        if not self.process.alive:
            raise Died


def this_flow() -> Flow | None:
    """Return the running flow; None in the test itself."""
    current = getcurrent()
    return current if isinstance(current, Flow) else None


def stop(why: str, waits_for: Callable[[], bool] = lambda: True) -> str | None:
    """Stop the running flow and return its order. Does nothing in the test itself."""
    flow = this_flow()
    return flow.rest(why, waits_for) if flow is not None else None


# --- replacements for `threading` and `time` in the product ----------------------------------------------------------


class FlowLock:
    """A reentrant lock between flows."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock. Ignores a positive `timeout`: here the holder always continues, or its process dies."""
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
    """A thread of the product as a flow of the process that starts it."""

    def __init__(self, *, target: Callable[..., Any], args: tuple[Any, ...], name: str, daemon: bool) -> None:
        self._target, self._args, self._name = target, args, name

    def start(self) -> None:
        starter = this_flow()
        assert starter is not None, "a thread started by no flow"
        flow = Flow(starter.process, self._name, lambda: self._target(*self._args), starter.hub)
        flow.attempt = next((one for one in self._args if isinstance(one, Run)), None)


class FlowThreading:
    """Replaces `threading` in `aijobs.engine.engine`."""

    Thread = FlowThread
    Lock = FlowLock
    Event = FlowEvent


class VirtualTime:
    """Replaces `time` in the product: follows the manual clock, and never sleeps."""

    def __init__(self, clock: ManualClock, begin: datetime) -> None:
        self._clock, self._begin = clock, begin

    def monotonic(self) -> float:
        return 1000 + (self._clock.at - self._begin).total_seconds()

    def sleep(self, _seconds: float) -> None:
        """Stop the flow instead: other flows may act before a unit of work is retried."""
        flow = this_flow()
        if flow is not None and not flow.away_for:
            flow.rest(CONFIRM)


TIMED = ("aijobs.db.database", "aijobs.engine.token", "aijobs.engine.watcher", "aijobs.engine.active_runs")
TIMED_PASSES = ("aijobs.upkeep.dispatcher",)


@contextmanager
def one_thread(time: VirtualTime) -> Iterator[None]:
    """Patch product modules to use flows as threads and the manual clock as time."""
    patches: list[Any] = [mock.patch(f"{module}.time", time) for module in (*TIMED, *TIMED_PASSES)]
    patches.append(mock.patch("aijobs.engine.engine.threading", FlowThreading))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
