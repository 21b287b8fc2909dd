"""What a consumer process is built from. `wiring/` fills it: `queues/` knows neither engine nor passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aijobs.queues.message import JobMessage


def _nothing(grace_s: float = 0.0) -> None:
    """The start and end of a crew without threads of its own."""


def _unnoted(popped: bool) -> None:
    """The `asked` of a crew without a heartbeat."""


def _no_suspect() -> bool:
    """The `run_suspect` of a crew that runs no jobs."""
    return False


@dataclass(frozen=True)
class Pass:
    """A periodic pass. `run` may be called at any time, by any number of processes at once."""

    name: str
    every_s: float
    run: Callable[[], object]


@dataclass(frozen=True)
class Crew:
    """What a consumer process is built from. Built at its start, so that importing a queue needs nothing."""

    run_job: Callable[[JobMessage], object] | None = None
    """Run a job; never raises. `PUT_BACK` puts the message back, and the worker waits a little. None on the maintenance
    queue.
    """
    run_suspect: Callable[[], bool] = _no_suspect
    """Run one suspect and return whether there was one. Never raises. It keeps one slot busy at most."""
    passes: Sequence[Pass] = ()
    asked: Callable[[bool], None] = _unnoted
    """Called each time the queue answered a worker, with whether there was a message."""
    start: Callable[[], None] = _nothing
    """Called before the first message is taken. An error ends the process."""
    before_first: Sequence[Callable[[], object]] = ()
    """Called once, after `start` and before the first message is taken. Errors are logged."""
    catch_up: Sequence[Callable[[], object]] = ()
    """Called once, in order, while the first messages are handled. Errors are logged; the passes try again."""
    drain: Callable[[float], None] = _nothing
    """Take no new jobs, wait so many seconds for running ones, then release the rest."""
