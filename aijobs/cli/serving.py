"""A web process with workers behind it, for commands that need one for a while: our own, or that of `aijobs up`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aijobs.cli.terminal import Terminal
from aijobs.local.station import AlreadyUp, Station, StopRequests, answers
from aijobs.settings import Settings


def _nothing_to_look_after() -> None:
    """The station is another process's."""


@contextmanager
def served(settings: Settings, stop: StopRequests, terminal: Terminal) -> Iterator[tuple[str, Callable[[], None]]]:
    """Its address, and what to call a few times a second to keep it alive. What was started here ends here.

    `AlreadyUp` where `aijobs up` holds the instance and doesn't answer (yet).
    """
    terminal.progress("Starting broker, web and workers…")
    station = Station(settings, stop, terminal.say, port=0)
    try:
        station.open()
    except AlreadyUp as other:
        if not answers(other.url, timeout_s=2.0):
            raise
        terminal.say(f"Using the aijobs that is up at {other.url}.")
        yield other.url, _nothing_to_look_after
        return
    with station:
        yield station.place.url, station.look_after
