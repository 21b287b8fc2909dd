"""Run everything on one machine: embedded broker, schema, web and three consumers. For `aijobs up` and `demo`."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from aijobs.db.clock import DatabaseClock
from aijobs.db.engines import build_engine
from aijobs.db.schema import upgrade
from aijobs.errors import AijobsError, BrokerUnavailable
from aijobs.local.embedded import EmbeddedBroker
from aijobs.local.supervisor import ChildDied, ChildSpec, Supervisor
from aijobs.queues.broker import RedisBroker
from aijobs.queues.presence import PresenceReader
from aijobs.queues.probe import refuse_unsupported
from aijobs.settings import Settings
from aijobs.web.local_server import GRACE_S
from aijobs.wiring.stores import build_credential_store

UP_FILE = "up.pid"
LOG_FOLDER = "logs"
READY_TIMEOUT_S = 30.0
_LOOK_S = 0.1
_NEXT_PORTS = 20

MAINTENANCE = "maintenance"
CONSUMERS = ("interactive", "background", MAINTENANCE)
"""The consumers by their names in `aijobs.workers`. Their queue's policy has the number of threads."""


class AlreadyUp(AijobsError):
    """Another process runs this instance; `url` is its address."""

    def __init__(self, pid: int, url: str, instance_path: Path) -> None:
        super().__init__(f"aijobs is up already for {instance_path}: process {pid}, {url}")
        self.url = url


class Stopped(AijobsError):
    """A stop was requested before the start was complete."""


_PIECE_S = 0.2


class StopRequests:
    """Ctrl-C, SIGTERM and a closed terminal: the first one requests a stop, the second one hurries it."""

    def __init__(self) -> None:
        self._count = 0
        self._asked = threading.Event()

    @property
    def asked(self) -> bool:
        return self._count > 0

    @property
    def hurried(self) -> bool:
        return self._count > 1

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the first one, and return whether it came.

        In short pieces: a signal that the system delivers to another thread doesn't interrupt this one.
        """
        until = time.monotonic() + seconds
        while not self._asked.wait(max(0.0, min(until - time.monotonic(), _PIECE_S))):
            if time.monotonic() >= until:
                return False
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._asked.set()

    @contextmanager
    def listening(self) -> Iterator[StopRequests]:
        """Handle the signals in the block, and restore the old handlers after it."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class InstanceLock:
    """Allows one process for one `instance/`. The kernel frees the lock with the process, so it is never stale."""

    def __init__(self, instance_path: Path) -> None:
        self._instance_path = instance_path
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Take the lock. `AlreadyUp` if another process holds it. Harmless if it is held here."""
        if self._file is not None:
            return
        self._instance_path.mkdir(parents=True, exist_ok=True)
        file = (self._instance_path / UP_FILE).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            pid, url = _read_up_file(file.read())
            file.close()
            raise AlreadyUp(pid, url, self._instance_path) from None
        self._file = file

    def tell(self, url: str) -> None:
        """Write the holder and its address to the lock file."""
        assert self._file is not None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n{url}\n")
        self._file.flush()

    def release(self) -> None:
        """Release the lock. Harmless if it isn't held."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _read_up_file(text: str) -> tuple[int, str]:
    pid, _, url = text.strip().partition("\n")
    return (int(pid) if pid.isdigit() else 0), url or "still starting"


def listen(host: str, port: int, *, may_differ: bool) -> socket.socket:
    """Return a listening socket for the web process, so that the port stays ours while that one restarts.

    If the port is in use and `may_differ`: the next free one. Otherwise `AijobsError`.
    """
    ports = (port, *range(port + 1, port + _NEXT_PORTS), 0) if may_differ and port else (port,)
    for number in ports:
        try:
            listener = socket.create_server((host, number), family=_family(host), backlog=512)
        except OSError as error:
            refusal = error
        else:
            return listener
    # A negative number is a name that can't be resolved.
    why = os.strerror(refusal.errno) if refusal.errno and refusal.errno > 0 else refusal.strerror
    raise AijobsError(f"can't listen on {host}:{port}: {why}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@dataclass(frozen=True)
class Place:
    """The address of the web process on this machine."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class Station:
    """Everything on one machine. Use it as a context manager: in the block everything runs, after it nothing
    is left.
    """

    def __init__(
        self, settings: Settings, stop: StopRequests, say: Callable[[str], None], *, port: int | None = None
    ) -> None:
        """`port` 0: any free one; None: that of the settings, or the next free one if it is the default."""
        self._settings, self._stop, self._say, self._port = settings, stop, say, port
        self._lock = InstanceLock(settings.instance_path)
        self._broker = None if settings.redis_url else EmbeddedBroker(settings.instance_path)
        self._socket: socket.socket | None = None
        log_folder = settings.instance_path / LOG_FOLDER
        self._web = Supervisor(log_folder, say)
        self._consumers = Supervisor(log_folder, say)
        self.place = Place(settings.bind, settings.port)

    def claim(self) -> None:
        """Take the instance's lock. `AlreadyUp` if another process has it."""
        self._lock.take()

    def open(self) -> None:
        """Start everything and wait until it answers. If that fails, stop what was started.

        `AlreadyUp` if another process runs this instance; `Stopped`; `AijobsError` with one line.
        """
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Station:
        if self._socket is None:
            self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._lock.take()
        self._socket = self._listen()
        self.place = Place(self._settings.bind, self._socket.getsockname()[1])
        self._lock.tell(self.place.url)
        self._start_broker()
        self._prepare_database()
        self._web.start(self._web_spec(self._socket.fileno()))
        for name in CONSUMERS:
            self._consumers.start(self._consumer_spec(name))
        self._wait_until_it_answers()

    def _listen(self) -> socket.socket:
        wanted = self._settings.port if self._port is None else self._port
        default = self._settings.port == Settings.port
        found = listen(self._settings.bind, wanted, may_differ=default and self._port is None)
        port = found.getsockname()[1]
        if wanted not in (0, port):
            self._say(f"Port {wanted} is taken; using {port}.")
        return found

    def _start_broker(self) -> None:
        if self._broker is not None:
            self._broker.start()
        else:
            broker = RedisBroker.from_settings(self._settings)
            refuse_unsupported(broker.client)
            broker.ping()
            broker.close()

    def _prepare_database(self) -> None:
        """Create the schema, and check the ring of keys against the stored credentials: here it is one line, not a dead
        child.
        """
        engine = build_engine(self._settings.database_url)
        try:
            upgrade(engine)
            with Session(engine) as session:
                build_credential_store(self._settings, DatabaseClock()).check_ring(session)
        finally:
            engine.dispose()

    def _web_spec(self, descriptor: int) -> ChildSpec:
        # Its settings were checked here. Without AIJOBS_ENV it would refuse development keys.
        env = ("/usr/bin/env", f"AIJOBS_ENV={self._settings.env}")
        command = [*env, sys.executable, "-m", "aijobs.web.local_server", str(descriptor)]
        return ChildSpec("web", command, stop_timeout_s=GRACE_S + 5, inherit_fds=(descriptor,))

    def _consumer_spec(self, name: str) -> ChildSpec:
        command = [sys.executable, "-m", "huey.bin.huey_consumer", f"aijobs.workers.{name}"]
        return ChildSpec(name, command, stop_timeout_s=self._settings.shutdown_grace_s + 10)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not (self._answers() and self._workers_are_there()):
            if self._stop.asked:
                raise Stopped("stopped while starting")
            try:
                self._web.require_alive()
                self._consumers.require_alive()
            except ChildDied as death:
                raise AijobsError(str(death)) from None
            if time.monotonic() > deadline:
                logs = self._settings.instance_path / LOG_FOLDER
                raise AijobsError(f"web and workers aren't ready after {READY_TIMEOUT_S:g} s (see {logs})")
            self._stop.wait(_LOOK_S)

    def _answers(self) -> bool:
        return answers(self.place.url, timeout_s=1.0)

    def _workers_are_there(self) -> bool:
        """Return whether the job consumers write heartbeats, so that a job that is created now starts at once."""
        broker = RedisBroker.from_settings(self._settings)
        try:
            present = {worker.pid for worker in PresenceReader(broker.window).read()}
        except BrokerUnavailable:
            return False
        finally:
            broker.client.close()
        return all(child.pid in present for child in self._consumers.children if child.spec.name != MAINTENANCE)

    def supervise(self) -> None:
        """Keep everything running until a stop is requested."""
        while not self._stop.wait(2 * _LOOK_S):
            self.look_after()

    def look_after(self) -> None:
        """Check every process once. Call it a few times a second."""
        if self._broker is not None and not _is_alive(self._broker.pid):
            self._say("the embedded broker ended; starting everything again with a new one")
            self._stop_children()
            self._broker.stop()
            self._broker.start()
            assert self._socket is not None
            self._web.start(self._web_spec(self._socket.fileno()))
            for name in CONSUMERS:
                self._consumers.start(self._consumer_spec(name))
        self._web.revive()
        self._consumers.revive()

    def close(self) -> None:
        """Stop web, consumers and broker, in this order; by force after a second signal."""
        self._stop_children()
        self._close_database()
        if self._broker is not None:
            self._broker.stop()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._lock.release()

    def _close_database(self) -> None:
        """Open and close the SQLite file last. If two processes close it at once, neither merges `-wal` into it."""
        engine = build_engine(self._settings.database_url)
        if engine.dialect.name == "sqlite":
            with suppress(SQLAlchemyError):  # The next process that closes the file merges it.
                engine.connect().close()
        engine.dispose()

    def _stop_children(self) -> None:
        self._web.stop(lambda: self._stop.hurried)
        self._consumers.stop(lambda: self._stop.hurried)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def answers(url: str, timeout_s: float) -> bool:
    """Return whether our web process answers at `url` and is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=timeout_s) as answer:  # noqa: S310 - our own address
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False
