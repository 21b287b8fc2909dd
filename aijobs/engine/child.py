"""Parent side of the suspects' child process: start it, send it jobs, kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

MODULE = "aijobs.suspect_worker"
"""What the child runs: the function `main` of this module, with the number of its end of the connection."""
_START = "import importlib, sys; module, end, *sys.path = sys.argv[1:]; importlib.import_module(module).main(int(end))"
"""With the parent's own path, wherever its modules were found."""

LOOK_S = 1.0
"""Between two looks whether a child that says nothing still lives."""

Answer = dict[str, Any]
"""How the attempt went: `outcome`, and the `events` that were published in the child."""


class ChildUnused(Exception):
    """The child was gone before it had the job in hand."""


class Child:
    """A fresh interpreter that runs one attempt after another. Never forked: this process has threads and connections.

    It ends when this process does, however that ends: its standard input is then closed.
    """

    def __init__(self) -> None:
        """Start it; it needs a second or two until it `is_ready`. `OSError` where no process is to be had."""
        self._connection, theirs = Pipe()
        self._guard = threading.Lock()
        self._runs: str | None = None
        """The token of the attempt that it has in hand."""
        self._ready = self._killed = self._reaped = False
        with theirs:
            end = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, MODULE, str(end), *sys.path],
                stdin=subprocess.PIPE,
                pass_fds=(end,),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether it is dead, or just being killed."""
        return self._killed or self._process.poll() is not None

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded everything and takes a job."""
        if not self._ready and not self._killed and self._connection.poll():
            self._ready = self._receive() is not None
        return self._ready

    def run(self, token: str, order: Any, on_cancel: Callable[[Callable[[], object]], None]) -> Answer | None:
        """Give it an attempt and wait for its answer; None where it died over it. `ChildUnused`.

        `on_cancel` takes what is to be called when the attempt must stop: that kills the child.
        """
        with self._guard:
            if self._killed or self._runs is not None:
                raise ChildUnused
            self._runs = token
        on_cancel(lambda: self._kill_over(token))
        answer = None
        try:
            self._send(order)
            if self._receive() is None:
                raise ChildUnused
            answer = self._receive()
        finally:
            with self._guard:
                self._runs = None
            if answer is None:
                self.kill()
        return answer

    def kill(self) -> None:
        """End it with all that its jobs have started, and wait until it is gone."""
        with self._guard:
            first, self._killed, self._reaped = not self._reaped, True, True
        if first:  # Afterwards another process may have its number.
            self._kill_group()
            self._process.communicate()

    def _kill_over(self, token: str) -> None:
        """Kill it where it still has this attempt in hand, and no other that came after it."""
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

    def _receive(self) -> Answer | None:
        try:
            # What the job's code has forked may keep the connection open after the child's death.
            while not self._connection.poll(LOOK_S):
                if self._process.poll() is not None and not self._connection.poll():
                    return None
            received: Answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError, ValueError):  # Whatever the job's code wrote into it instead is no answer.
            return None
        return received
