"""The processes of a run: database, broker, web, three workers, two maintenance consumers, and their supervisor."""

from __future__ import annotations

import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import provider
from tests.chaos.plan import MAINTENANCE, WEB, WORKERS
from tests.chaos.provider import Provider
from tests.support.databases import Databases, MariaDbServer, PostgresServer, SqliteDatabases
from tests.support.plug_ins import plug_in
from tests.support.polling import poll
from tests.support.ports import free_port
from tests.support.processes import Program, Run
from tests.support.rows import prepare_database
from tests.support.servers import Server, ValkeyServer

ROOT = Path(__file__).parents[2]
JOB_TYPES = {"chaos": "tests.chaos.chaos_job", "served": "tests.chaos.served_job"}
RESTART_AFTER_S = 0.3
READY_TIMEOUT_S = 60.0

SHORT_TIMES = {
    "AIJOBS_LEASE_S": "2",
    "AIJOBS_HEARTBEAT_S": "0.5",
    "AIJOBS_LEASE_GRACE_S": "1",
    "AIJOBS_REAPER_S": "1",
    "AIJOBS_REDRIVE_S": "1",
    "AIJOBS_REDRIVE_DUE_S": "1",
    "AIJOBS_CLAIM_TTL_S": "2",
    "AIJOBS_CLAIM_RELEASE_S": "1",
    "AIJOBS_DISPATCHER_S": "1",
    "AIJOBS_HANDOVER_DELAY_S": "0.5",
    "AIJOBS_SHUTDOWN_GRACE_S": "1",
    "AIJOBS_WATCHER_S": "0.2",
    "AIJOBS_BREAKER_FAILURES": "2",
    "AIJOBS_BREAKER_OPEN_S": "0.8",
    "AIJOBS_PROVIDER_PATIENCE_S": "25",
    # A hung call on the only route ends with its attempt. This is longer than the slowest answer.
    "AIJOBS_JOB_TIMEOUTS": "served=10",
}
PROVIDERS = """
[provider.{name}]
base_url = "{url}/v1"
models = ["{model}"]
prices_as = "deepseek"
max_concurrent_calls = 30
connect_s = 1
first_data_s = {limit_s}
idle_s = {limit_s}

[routes]
default = ["{name}/{model}", "local/local-extractive-v1"]
served = ["{name}/{model}"]
built_in = ["local/local-extractive-v1"]
"""


class ThreadedRun(Run):
    """A run that many threads may start programs in."""

    def __init__(self) -> None:
        self._ordering = threading.Lock()
        super().__init__()

    def _order(self, order: str) -> None:
        with self._ordering:
            super()._order(order)


class DurablePostgres(PostgresServer):
    """PostgreSQL that keeps committed data after a SIGKILL, as in production."""

    def _command(self) -> Sequence[Any]:
        return [*super()._command(), "-c", "synchronous_commit=on", "-c", "full_page_writes=on"]


class DurableMariaDb(MariaDbServer):
    """MariaDB that keeps committed data after a SIGKILL, as in production."""

    def _command(self) -> Sequence[Any]:
        return [*super()._command(), "--innodb-flush-log-at-trx-commit=2", "--innodb-doublewrite=1"]


SERVERS: Mapping[str, Callable[[Run], Databases]] = {
    "sqlite": SqliteDatabases,
    "postgresql": DurablePostgres,
    "mariadb": DurableMariaDb,
}


@dataclass
class Role:
    """A named process that the supervisor keeps alive, with the exit codes and logs of its predecessors."""

    name: str
    command: list[str]
    program: Program | None = None
    starts: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    """Exit codes, negative for a signal."""
    start_at: float = 0.0
    logs: list[str] = field(default_factory=list)


class Stage:
    """The processes of a run; as a context manager, it always ends them all and removes their files."""

    def __init__(self, kind: str, provider: Provider) -> None:
        """Use a database of this kind and a running provider, which the caller stops. Raises ServerMissing if the
        database or the broker isn't installed.
        """
        self.provider = provider
        self.run = ThreadedRun()
        try:
            self.folder = self.run.new_folder("chaos")
            self.plug_in = self.folder / "plug-in"
            """On the Python path of every process of the run, so that it loads the chaos job types."""
            self.crash_folder = self.run.new_folder("points")
            self.databases = SERVERS[kind](self.run)
            self.valkey = ValkeyServer(self.run)
        except BaseException:
            self.run.close()
            raise
        self.port = free_port()
        self.roles: dict[str, Role] = {}
        self.env: dict[str, str] = {}
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    def __enter__(self) -> Stage:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- start and end -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and wait until all processes are ready."""
        self.valkey.start()
        if isinstance(self.databases, Server):
            self.databases.start()
        self.env = self._environment(self.databases.create_database(prepare_database))
        for name in (*WORKERS, *MAINTENANCE):
            queue = name.partition("-")[0]
            threads = "1" if queue == "maintenance" else "2"
            command = [sys.executable, "-m", "tests.chaos.consumer", f"aijobs.workers.{queue}", "-w", threads]
            self.roles[name] = Role(name, command)
        self.roles[WEB] = Role(WEB, self._web_command())
        self._supervisor.start()
        self.wait_until_ready()

    def close(self) -> None:
        """End all processes and remove the folders."""
        self._closing.set()
        if self._supervisor.is_alive():
            self._supervisor.join(30)
        for role in self.roles.values():
            if role.program is not None:
                role.program.kill()
                role.program.stop()
        for server in (self.valkey, self.databases):
            if isinstance(server, Server) and server.program is not None:
                server.stop()
        self.run.close()

    def _environment(self, database_url: str) -> dict[str, str]:
        return {
            "AIJOBS_INSTANCE_PATH": str(self.folder),
            "AIJOBS_DATABASE_URL": database_url,
            "AIJOBS_REDIS_URL": self.valkey.url,
            "AIJOBS_MESSAGE_KEYS": f"k1:{'m' * 32}",
            "AIJOBS_CREDENTIAL_KEYS": f"k1:{'c' * 32}",
            "AIJOBS_SECRET_KEY": "s" * 32,
            "AIJOBS_JWT_SECRET": "j" * 32,
            "AIJOBS_USER_ACTIVE_JOBS": "0",
            "AIJOBS_PROVIDERS": str(self._providers_file()),
            f"AIJOBS_{provider.NAME.upper()}_API_KEY": "sk-chaos-0123456789abcdef",
            "CHAOS_FOLDER": str(self.crash_folder),
            "PYTHONPATH": f"{plug_in(self.plug_in, 'aijobs-chaos', JOB_TYPES)}:{ROOT}",
            **SHORT_TIMES,
        }

    def _providers_file(self) -> Path:
        path = self.folder / "providers.toml"
        names = {"name": provider.NAME, "model": provider.MODEL, "limit_s": provider.LIMIT_S}
        path.write_text(PROVIDERS.format(url=self.provider.url, **names))
        return path

    def _web_command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{self.port}"),
            *("--config", "python:aijobs.web.server", "--workers", "1"),
            *("--graceful-timeout", "3", "--log-level", "warning"),
            "tests.chaos.web:create_app()",
        ]

    # --- keeping alive -----------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        while not self._closing.wait(0.05):
            for role in self.roles.values():
                with self._guard:
                    self._look_after(role)

    def _look_after(self, role: Role) -> None:
        now = time.monotonic()
        if role.program is not None and not role.program.is_running:
            assert role.program.returncode is not None
            role.ends[role.program.returncode] += 1
            role.program.stop()  # Ends its process group.
            role.logs.append(role.program.output)
            role.program, role.start_at = None, now + RESTART_AFTER_S
        if role.program is None and now >= role.start_at:
            env = {**self.env, "CHAOS_NAME": role.name}
            role.program = Program(self.run, role.command, name=role.name, env=env, cwd=self.folder)
            role.starts += 1

    def signal(self, name: str, number: int) -> bool:
        """Send a signal to a process by its name. Return whether it runs."""
        with self._guard:
            program = self.roles[name].program
            if program is None or not program.is_running:
                return False
            program.send_signal(number)
            return True

    def pid_of(self, name: str) -> int | None:
        """Return the pid of the running process with this name, if any."""
        with self._guard:
            program = self.roles[name].program
            return program.pid if program is not None and program.is_running else None

    # --- state -------------------------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Wait until each process is ready."""
        poll(self.all_ready, timeout=READY_TIMEOUT_S, interval=0.1, what="every process is ready")

    def all_ready(self) -> bool:
        """Return whether each process is ready."""
        return all(self._is_ready(role) for role in self.roles.values())

    def _is_ready(self, role: Role) -> bool:
        with self._guard:
            program = role.program
        if program is None or not program.is_running:
            return False
        return self._web_answers() if role.name == WEB else "Huey consumer started" in program.output

    def _web_answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def outputs(self) -> dict[str, list[str]]:
        """Return the output of each role's processes, the oldest first."""
        return {name: [*role.logs, role.program.output if role.program else ""] for name, role in self.roles.items()}
