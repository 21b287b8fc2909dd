"""A web process with workers, for commands that need one for a while: our own, or that of `aijobs up`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from aijobs.cli.terminal import Terminal
from aijobs.local.station import AlreadyUp, Station, StopRequests, answers
from aijobs.settings import IN_CHECKOUT, Settings

START_COMMAND = "make run" if IN_CHECKOUT else "aijobs up"
"""The command that starts everything. In a checkout `aijobs` is seldom on the PATH, and a wheel has no Makefile."""


class Served(NamedTuple):
    """A running web process."""

    url: str
    look_after: Callable[[], None]
    """Keeps it running. Call it a few times a second."""
    stays: bool
    """Whether it runs on afterwards."""

    def console(self, path: str = "") -> str:
        """Return where to see it in the console: a URL if it stays, otherwise how to get one."""
        if self.stays:
            return f"{self.url}/console/{path}"
        return f"/console/{path} at the address that `{START_COMMAND}` prints"


def _nothing_to_look_after() -> None:
    """Do nothing: another process keeps it running."""


@contextmanager
def served(settings: Settings, stop: StopRequests, terminal: Terminal) -> Iterator[Served]:
    """Start everything, or use what `aijobs up` runs. What was started here is stopped here.

    `AlreadyUp` if `aijobs up` holds the instance and doesn't answer (yet).
    """
    station = Station(settings, stop, terminal.say, port=0)
    try:
        station.claim()
    except AlreadyUp as other:
        if not answers(other.url, timeout_s=2.0):
            raise
        terminal.say(f"Using the aijobs that is up at {other.url}.")
        yield Served(other.url, _nothing_to_look_after, stays=True)
        return
    terminal.progress("Starting broker, web and workers…")
    with station:
        yield Served(station.place.url, station.look_after, stays=False)
