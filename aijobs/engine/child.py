"""The parent's side of a child process: start it, send it attempts, kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from aijobs.engine.outcome import Outcome
from aijobs.forks import new_lock, renew_in_child

MODULE = "aijobs.child_worker"
"""The child runs `main` of this module, with the file descriptors of its connection and its lifeline."""
_START = (
    "import importlib, sys; module, end, lifeline, *sys.path = sys.argv[1:]; "
    "importlib.import_module(module).main(int(end), int(lifeline))"
)
"""With the parent's `sys.path`."""

POLL_S = 1.0
"""The time between two checks whether a silent child still lives."""

MOST_BYTES = 1_000_000
"""Upper limit for one message from the child."""

Answer = dict[str, Any]
"""How the attempt ended: `outcome`, and the `events` that were published in the child. Sent with the `token`."""


_OUTCOMES = frozenset(Outcome)


class ChildUnused(Exception):
    """The child was gone before it took the attempt."""


class Child:
    """A fresh interpreter that runs one attempt after another. Never forked: this process has threads and connections.

    It exits when this process ends in any way, because that closes the lifeline, a pipe.
    """

    def __init__(self) -> None:
        """Start it. It needs a second or two until it `is_ready`. `OSError` if no process can be started."""
        self._connection, theirs = Pipe()
        lifeline, ours = os.pipe()
        self._lifeline = os.fdopen(ours, "wb", buffering=0)
        self._guard = new_lock()
        self._runs: str | None = None
        """The token of the attempt that it runs."""
        self._ready = self._killed = self._reaped = False
        self.is_fresh = True
        """It has run no attempt yet."""
        self.started_at = time.monotonic()
        renew_in_child(self, Child._forget)
        with theirs, os.fdopen(lifeline, "rb", buffering=0):
            ends = (theirs.fileno(), lifeline)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, MODULE, *map(str, ends), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=ends,
                start_new_session=True,
            )

    def _forget(self) -> None:
        """In a fork of this process: close our ends, which would keep the child alive, and never kill it."""
        self._killed = self._reaped = True
        self._lifeline.close()
        self._connection.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether it is dead or being killed."""
        return self._killed or self._process.poll() is not None

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded everything and takes attempts."""
        if not self._ready and not self._killed and self._connection.poll():
            self._ready = self._receive() == {"ready": True}
        return self._ready

    def run(self, token: str, order: Any, on_cancel: Callable[[Callable[[], object]], None]) -> Answer | None:
        """Send it an attempt and wait for the answer; None if it died or gave no proper one. `ChildUnused`.

        `on_cancel` registers a function that is called when the attempt must stop: it kills the child.
        """
        with self._guard:
            if self._killed or self._runs is not None:
                raise ChildUnused
            self._runs, self.is_fresh = token, False
        on_cancel(lambda: self._kill_over(token))
        answer = None
        try:
            self._send(order)
            if self._receive() != {"token": token, "begun": True}:
                raise ChildUnused
            message = self._receive()
            answer = message if _is_answer(message, token) else None
        finally:
            with self._guard:
                self._runs = None
            if answer is None:
                self.kill()
        return answer

    def kill(self) -> None:
        """Kill it and all that its jobs have started, and wait until it is gone."""
        with self._guard:
            first, self._killed, self._reaped = not self._reaped, True, True
        if first:  # Once only: later another process may have its pid.
            self._kill_group()
            self._process.wait()
            self._lifeline.close()

    def _kill_over(self, token: str) -> None:
        """Kill it if it still runs this attempt, and not a later one."""
        with self._guard:
            if self._runs == token:
                self._killed = True
                self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, message: Any) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise ChildUnused from error

    def _receive(self) -> Any:
        """Return its next message; None if it is dead, or if it sent no message."""
        try:
            # A fork made by the job's code may keep the connection open after the child's death.
            while not self._connection.poll(POLL_S):
                if self._process.poll() is not None and not self._connection.poll():
                    return None
            return json.loads(self._connection.recv_bytes(MOST_BYTES))
        except (EOFError, OSError, ValueError, RecursionError):  # The job's code may have written anything to it.
            return None


def _is_answer(message: Any, token: str) -> bool:
    """Return whether it is the answer for this attempt."""
    match message:
        case {"token": of, "outcome": outcome, "events": [*events]} if of == token and outcome in _OUTCOMES:
            return all(_is_event(event) for event in events)
    return False


def _is_event(event: Any) -> bool:
    match event:
        case [str(), str(), dict()]:
            return True
    return False
