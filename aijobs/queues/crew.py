"""What a consumer process works with. The wiring fills it: the queues know neither engine nor passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aijobs.queues.message import JobMessage


def _nothing(grace_s: float = 0.0) -> None:
    """What a crew without threads of its own does at start and end."""


def _unnoted(popped: bool) -> None:
    """What a crew without a heartbeat does when the queue answers."""


def _no_suspect() -> bool:
    """What a crew that runs no jobs answers."""
    return False


@dataclass(frozen=True)
class Pass:
    """A periodic duty: what `run` does is harmless at any time, any number at once."""

    name: str
    every_s: float
    run: Callable[[], object]


@dataclass(frozen=True)
class Crew:
    """What a consumer process works with. Built when it starts, so that importing a queue needs nothing."""

    run_job: Callable[[JobMessage], object] | None = None
    """Does a job; never raises. `PUT_BACK` puts the message back, and the worker waits a little. None on the
    maintenance queue."""
    run_suspect: Callable[[], bool] = _no_suspect
    """Runs one job that waits to be run alone; whether there was one. Never raises. At most one slot is kept busy."""
    passes: Sequence[Pass] = ()
    asked: Callable[[bool], None] = _unnoted
    """Called each time the queue answered a worker that asked for a message, with whether there was one."""
    start: Callable[[], None] = _nothing
    """Called before the first message is taken; what it raises ends the process."""
    before_first: Sequence[Callable[[], object]] = ()
    """Done once, after `start` and before the first message is taken; what raises is logged."""
    catch_up: Sequence[Callable[[], object]] = ()
    """Done once, in turn and beside the first messages; what raises is logged, and left to the passes."""
    drain: Callable[[float], None] = _nothing
    """Takes nothing new, waits so many seconds for what runs, then gives back what is still held."""
