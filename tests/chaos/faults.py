"""The faults of a plan, performed on a stage."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import redis

from aijobs.queues.broker import queue_key
from tests.chaos import crashes
from tests.chaos.ledger import append, read_lines
from tests.chaos.plan import QUEUE_KEYS, WORKERS, Fault
from tests.support.servers import Server

if TYPE_CHECKING:
    from tests.chaos.driver import Driver
    from tests.chaos.stage import Stage

WORK_WITHIN_S = 4.0
STOPS_LATE_S = 3.0
UNBLOCK_TRIES = 5
TAKE_BACK_TRIES = 50
DROP_SHARE = 0.3
DROP_MARK = "drop"
"""While a file of this name is in the crash folder, workers lose popped messages."""
DROPPED = "dropped"
"""The file with a line for each lost message."""


class Faults:
    """Performs faults on a stage. `perform` is thread-safe."""

    def __init__(self, stage: Stage, driver: Driver) -> None:
        """`driver` knows which process holds a job, and whether the database is blocked."""
        self._stage, self._driver = stage, driver
        self.done: Counter[str] = Counter()
        """How often each kind was performed. A fault whose process was restarting has no effect and isn't counted."""
        self._one_at_a_time = {name: threading.Lock() for name in ("broker", "database", "provider")}

    def perform(self, fault: Fault) -> None:
        """Perform the fault, and undo it after its time."""
        how: dict[str, Callable[[Fault], bool]] = {
            "crash": self._arm,
            "kill": self._kill,
            "freeze": self._freeze,
            "freeze at": self._freeze_at,
            "term": self._terminate,
            "flush": self._flush,
            "stop": self._stop,
            "drop": self._drop,
            "refuse": self._refuse,
            "outage": self._outage,
        }
        with self._one_at_a_time.get(fault.target) or nullcontext():
            happened = how[fault.kind](fault)
        if happened:
            self.done[f"{fault.kind} {self._class_of(fault.target)}"] += 1

    def heal(self) -> None:
        """Undo all faults: disarm crash points, resume processes, start servers."""
        crashes.disarm(self._stage.crash_folder)
        self.thaw()
        self._stage.provider.is_out = False
        self._stage.provider.start()
        self._stage.valkey.ensure_running()
        for key in QUEUE_KEYS:
            self._take_back(key)
        if isinstance(self._stage.databases, Server):
            self._stage.databases.ensure_running()

    def thaw(self) -> None:
        """Resume all suspended processes. Repeat it: a process may stop some time after it took its point."""
        for name in self._stage.roles:
            self._stage.signal(name, signal.SIGCONT)

    @staticmethod
    def _class_of(target: str) -> str:
        return target if target in (*crashes.POINTS, *crashes.STOP_POINTS) else target.partition("-")[0]

    def _arm(self, fault: Fault) -> bool:
        crashes.arm(self._stage.crash_folder, fault.target, fault.count)
        return False  # The crash is counted, not the arming.

    def _server(self, name: str) -> Server:
        server = self._stage.valkey if name == "broker" else self._stage.databases
        assert isinstance(server, Server)
        return server

    def _kill(self, fault: Fault) -> bool:
        if fault.target == "database":
            server = self._server("database")
            server.kill()
            time.sleep(fault.lasts)
            self._start(server)
            return True
        return self._hurt(fault.target, signal.SIGKILL)

    def _terminate(self, fault: Fault) -> bool:
        return self._hurt(fault.target, signal.SIGTERM)

    def _hurt(self, name: str, number: int) -> bool:
        """Send a process a signal; to a worker while it runs a job, or after `WORK_WITHIN_S`."""
        ends = time.monotonic() + WORK_WITHIN_S
        while name in WORKERS and time.monotonic() < ends:
            pid = self._stage.pid_of(name)
            if pid is not None and self._driver.is_at_work(pid):
                break
            time.sleep(0.02)
        return self._stage.signal(name, number)

    def _freeze(self, fault: Fault) -> bool:
        if fault.target == "broker":
            server = self._server("broker")
            if not server.is_running:
                return False
            server.freeze()
            time.sleep(fault.lasts)
            if server.is_running:
                server.thaw()
            return True
        if not self._hurt(fault.target, signal.SIGSTOP):
            return False
        ends = time.monotonic() + fault.lasts
        if fault.target in WORKERS:
            self._move_out_of_write(fault.target)
        time.sleep(max(0.0, ends - time.monotonic()))
        self._stage.signal(fault.target, signal.SIGCONT)
        return True

    def _move_out_of_write(self, name: str) -> None:
        """Resume and suspend a worker until it holds no write lock, so that others can take over its jobs."""
        for _ in range(UNBLOCK_TRIES):
            if self._driver.can_write():
                return
            self._stage.signal(name, signal.SIGCONT)
            time.sleep(0.05)
            self._stage.signal(name, signal.SIGSTOP)

    def _freeze_at(self, fault: Fault) -> bool:
        """Suspend a process between two steps, and resume it long after its lease expired."""
        stops = self._stage.crash_folder / crashes.STOPS
        before = len(read_lines(stops))
        crashes.arm(self._stage.crash_folder, fault.target, fault.count, stop_within_s=WORK_WITHIN_S)
        # On a busy machine, a process may stop some time after it read the clock.
        ends = time.monotonic() + WORK_WITHIN_S + STOPS_LATE_S
        while time.monotonic() < ends:
            for line in read_lines(stops)[before:]:
                if line["point"] == fault.target:
                    time.sleep(fault.lasts)
                    self._stage.signal(line["process"], signal.SIGCONT)
                    return True
            time.sleep(0.05)
        return False  # No process reached the point in time; a later one ignores it.

    def _flush(self, fault: Fault) -> bool:
        try:
            with self._stage.valkey.client() as client:
                client.flushall()
        except redis.RedisError:
            return False  # The broker is down, and will start empty.
        return True

    def _refuse(self, fault: Fault) -> bool:
        """Make Redis refuse one queue: its key gets a value of another type. Another key keeps the messages."""
        key = queue_key(fault.target)
        try:
            with self._stage.valkey.client() as client:
                if client.exists(key):
                    client.rename(key, f"{key}.aside")
                refused = client.set(key, "somebody else's")
        except redis.RedisError:
            return False
        ends = time.monotonic() + fault.lasts
        while time.monotonic() < ends:
            time.sleep(0.1)
        self._take_back(key)
        return bool(refused)

    def _take_back(self, key: str) -> None:
        """Delete the foreign value as soon as the broker answers, and restore the messages."""
        for _ in range(TAKE_BACK_TRIES):
            try:
                with self._stage.valkey.client() as client:
                    if client.type(key) == b"string":
                        client.delete(key)
                        if client.exists(f"{key}.aside"):
                            client.renamenx(f"{key}.aside", key)
                    return
            except redis.RedisError:
                time.sleep(0.2)

    def _outage(self, fault: Fault) -> bool:
        """Make the provider refuse all calls, which opens its breaker."""
        self._stage.provider.is_out = True
        time.sleep(fault.lasts)
        self._stage.provider.is_out = False
        return True

    def _stop(self, fault: Fault) -> bool:
        if fault.target == "provider":
            self._stage.provider.stop()
            time.sleep(fault.lasts)
            self._stage.provider.start()
            return True
        server = self._server(fault.target)
        server.stop()
        time.sleep(fault.lasts)
        self._start(server)
        return True

    @staticmethod
    def _start(server: Server, tries: int = 5) -> None:
        """Start a server, with retries: a killed database may still hold its files or its port."""
        for left in reversed(range(tries)):
            try:
                server.start()
                return
            except AssertionError:
                if not left:
                    raise
                server.stop()
                time.sleep(0.5)

    def _drop(self, fault: Fault) -> bool:
        """Lose about every third message, of the waiting ones (each considered once) and of those that workers pop."""
        rng, seen = random.Random(fault.seed), set[bytes]()
        ends = time.monotonic() + fault.lasts
        mark = self._stage.crash_folder / DROP_MARK
        mark.touch()
        with self._stage.valkey.client() as client:
            while time.monotonic() < ends:
                for key in QUEUE_KEYS:
                    self._drop_from(client, key, rng, seen)
                time.sleep(0.02)
        mark.unlink(missing_ok=True)
        return True

    def _drop_from(self, client: redis.Redis, key: str, rng: random.Random, seen: set[bytes]) -> None:
        try:
            waiting = [member for member in client.zrange(key, 0, -1) if member not in seen]
            for member in waiting:
                seen.add(member)
                if rng.random() < DROP_SHARE and client.zrem(key, member):
                    append(self._stage.crash_folder / DROPPED, what="dropped")
        except redis.RedisError:
            return  # The broker is down.
