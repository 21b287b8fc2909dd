"""Keep child processes running until they are told to stop, and leave none behind.

Each child leads a session of its own, so Ctrl-C in the terminal reaches only the supervisor, which stops them in order.
If the supervisor is killed, the kernel sends each child SIGTERM (Linux).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aijobs.machine import tied_command

FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 30.0
STEADY_AFTER_S = 10.0
"""After this time a child's back-off starts from the beginning again."""
REFUSAL = "aijobs: "
"""The start of the line in which a process says why it doesn't start."""


@dataclass(frozen=True)
class ChildSpec:
    """One program: its name (and its log's), its command, and its time to stop."""

    name: str
    command: Sequence[str]
    stop_timeout_s: float = 10.0
    stop_signal: int = signal.SIGTERM
    inherit_fds: tuple[int, ...] = ()


class ChildDied(Exception):
    """A child ended before it was ready. The text says which, how, and why."""


class Child:
    """One program that is kept running. Start it from the main thread: the kernel ties it to that thread."""

    def __init__(self, spec: ChildSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._back_off_s = FIRST_BACK_OFF_S
        self._restart_at: float | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the program. Its output is appended to its log."""
        self._restart_at = None
        self._started_at = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                tied_command(self.spec.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self.spec.inherit_fds,
            )

    def revive(self) -> str | None:
        """Start it again if it died and its back-off is over. Return one line for a new death, otherwise None."""
        if self._process is None or self.is_running:
            return None
        now = time.monotonic()
        if self._restart_at is None:
            if now - self._started_at >= STEADY_AFTER_S:
                self._back_off_s = FIRST_BACK_OFF_S
            self._restart_at = now + self._back_off_s
            line = f"{self.describe_end()}; starting it again in {self._back_off_s:g} s (see {self.log})"
            self._back_off_s = min(self._back_off_s * 2, LONGEST_BACK_OFF_S)
            return line
        if now >= self._restart_at:
            self.start()
        return None

    def describe_end(self) -> str:
        """Return how it ended, in half a line."""
        code = self._process.returncode if self._process else None
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"{self.spec.name} ended ({how})"

    def last_words(self) -> str:
        """Return why it refused to start, from its own line; otherwise the last line of its log."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        refusals = [line.removeprefix(REFUSAL) for line in lines if line.startswith(REFUSAL)]
        return (refusals or lines or ["its log is empty"])[-1][:300]

    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill_session(self) -> None:
        """Kill it with all processes of its session."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()


class Supervisor:
    """A set of children: started in order, restarted when they die, stopped in groups."""

    def __init__(self, log_folder: Path, say: Callable[[str], None]) -> None:
        self.children: list[Child] = []
        self._log_folder = log_folder
        self._say = say

    def start(self, spec: ChildSpec) -> Child:
        """Start a child with a new log; the old one is kept as `<name>.log.1`."""
        self._log_folder.mkdir(parents=True, exist_ok=True)
        log = self._log_folder / f"{spec.name}.log"
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        child = Child(spec, log)
        self.children.append(child)
        child.start()
        return child

    def revive(self) -> None:
        """Check every child once, and restart it if needed. Call it a few times a second."""
        for child in self.children:
            line = child.revive()
            if line:
                self._say(line)

    def require_alive(self) -> None:
        """Raise `ChildDied` if a child has ended. For the start, when a death is a mistake and not an accident."""
        for child in self.children:
            if not child.is_running:
                raise ChildDied(f"{child.describe_end()}: {child.last_words()}")

    def stop(self, hurry: Callable[[], bool]) -> None:
        """Stop the children one group after the other; at once and by force if `hurry()` returns true."""
        for child in self.children:
            child.signal(child.spec.stop_signal)
        deadlines = {id(c): time.monotonic() + c.spec.stop_timeout_s for c in self.children}
        waiting = list(self.children)
        while waiting:
            late = [c for c in waiting if hurry() or time.monotonic() > deadlines[id(c)]]
            for child in late:
                child.kill_session()
            waiting = [c for c in waiting if c.is_running]
            if waiting:
                time.sleep(0.05)
        for child in self.children:
            child.kill_session()  # Processes that a child left behind end with its session.
        self.children.clear()
