"""Programs that tests start: their output is kept and their end is certain.

Each program leads its own session, so that Ctrl-C in the terminal doesn't reach it and its children end with
it. The guardian ends it if pytest is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support import guardian
from tests.support.polling import poll

RUN_MARK = "PYTEST_RUN_MARK"
STOP_TIMEOUT_S = 60.0
"""How long a program may take to write or to end; long, because the machine may be busy."""
GUARDIAN_TIMEOUT_S = 60.0
"""How long the guardian may take for all programs and folders that a test process left."""


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without the developer's aijobs settings, plus `extra`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("AIJOBS_") and name != "DEEPSEEK_API_KEY"
    }
    return {**kept, **(extra or {})}


class Run:
    """One test process (an xdist worker or pytest itself) with its temporary folder and guardian.

    `mark` is in the environment of every process that it starts.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="aijobs-tests-"))
        # PostgreSQL refuses to run as root, so another user must be able to enter.
        self.folder.chmod(0o711)
        self.mark = uuid.uuid4().hex
        os.environ[RUN_MARK] = self.mark
        self._numbers = itertools.count(1)
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            bufsize=1,
        )
        self._order(f"d {self.folder}")

    def new_folder(self, name: str) -> Path:
        """Create an empty folder that is removed with the run; its path is short enough for a Unix socket."""
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir()
        return folder

    def started(self, pid: int) -> None:
        self._order(f"+{pid}")

    def ended(self, pid: int) -> None:
        self._order(f"-{pid}")

    def leftovers(self) -> list[str]:
        """Return the live processes that this run started, directly or not."""
        children = {child.pid for child in psutil.Process().children(recursive=True)}
        found = []
        for process in psutil.process_iter(["pid", "status", "cmdline"]):
            if process.pid in (os.getpid(), self._guardian.pid):
                continue
            if process.info["status"] == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(process.info["cmdline"] or [])
            # The helper process of multiprocessing lives as long as its parent, by design.
            if "multiprocessing.resource_tracker" in command:
                continue
            if process.pid in children or self._carries_mark(process):
                found.append(f"{process.pid} {command}")
        return found

    def _carries_mark(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(RUN_MARK) == self.mark
        except (psutil.Error, OSError):
            return False

    def close(self) -> None:
        """Let the guardian end the remaining processes and remove the folder."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        self._guardian.wait(timeout=GUARDIAN_TIMEOUT_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _order(self, order: str) -> None:
        assert self._guardian.stdin is not None
        self._guardian.stdin.write(order + "\n")


class Program:
    """A running program. `output` is its standard output and standard error so far."""

    def __init__(
        self,
        run: Run,
        command: Sequence[str | os.PathLike[str]],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        user: pwd.struct_passwd | None = None,
    ) -> None:
        self.name = name
        self.command = [os.fspath(part) for part in command]
        self._run = run
        self._log = run.new_folder("log") / f"{name}.log"
        as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=clean_environment(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **as_user,
            )
        run.started(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the program itself, not to its children."""
        self._process.send_signal(signal_number)

    def freeze(self) -> None:
        """Suspend it with SIGSTOP: its connections stay open and get no answer."""
        self.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send_signal(signal.SIGCONT)

    def wait(self, timeout: float = STOP_TIMEOUT_S) -> int:
        """Wait until it ends by itself and return its exit code. Raises AssertionError after `timeout`."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {timeout:g} s; its output:\n{self.output}") from None
        self._end_group()
        return code

    def wait_for_output(self, text: str, timeout: float = STOP_TIMEOUT_S) -> str:
        """Wait until `text` is in the output and return the output. Raises AssertionError if it ends or is late."""

        def written() -> bool:
            if text in self.output:
                return True
            assert self.is_running, f"{self.name} ended ({self.returncode}) without {text!r}:\n{self.output}"
            return False

        poll(written, timeout=timeout, what=f"{text!r} in the output of {self.name}:\n{self.output}")
        return self.output

    def kill(self) -> None:
        """Send SIGKILL to the program alone; its children end with the test at the latest."""
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def stop(self, signal_number: int = signal.SIGTERM, timeout: float = STOP_TIMEOUT_S) -> int:
        """End it and its children, by SIGKILL after `timeout` seconds. Return its exit code."""
        if self.is_running:
            self.send_signal(signal_number)
            # A suspended process handles other signals only after SIGCONT.
            self.send_signal(signal.SIGCONT)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_TIMEOUT_S)
        self._end_group()
        assert self.returncode is not None
        return self.returncode

    def _end_group(self) -> None:
        # The leader's children keep the group alive, so no other group has its number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._run.ended(self.pid)


class Processes:
    """The programs of one test."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.programs: list[Program] = []

    def spawn(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> Program:
        """Start a program with `env` added to an environment without AIJOBS_ settings."""
        program = Program(self._run, command, name=name or Path(command[0]).name, env=env, cwd=cwd)
        self.programs.append(program)
        return program

    def stop_all(self) -> None:
        """End all programs, the newest first. Signal all before waiting for any.

        Programs without children get SIGKILL, which is faster; the others get SIGTERM, so that they end their children.
        """
        for program in reversed(self.programs):
            if program.is_running:
                program.send_signal(signal.SIGTERM if psutil.Process(program.pid).children() else signal.SIGKILL)
                program.send_signal(signal.SIGCONT)
        for program in reversed(self.programs):
            program.stop()
