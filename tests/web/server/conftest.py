"""Fixtures: a real web process, started with the documented command line, and raw connections to it."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from aijobs.cli.tokens import issue_user_token
from aijobs.db.engines import build_engine
from aijobs.jobs.models import AiJob
from aijobs.local.station import answers
from aijobs.settings import Settings
from tests.contracts import documents
from tests.contracts.sources import ROOT
from tests.support.databases import SqliteDatabases
from tests.support.polling import poll
from tests.support.ports import free_port
from tests.support.processes import Processes, Run
from tests.support.rows import prepare_database
from tests.support.servers import ValkeyServer

NOTES = json.dumps(
    {
        "lang": "en",
        "source": {"id": "note-1", "title": "Osmosis"},
        "segments": [{"sid": "p1", "text": "Osmosis is the movement of water across a partially permeable membrane."}],
    }
).encode()


@dataclass(frozen=True)
class Answer:
    """The first answer on a connection that the server has closed, and the number of answers."""

    status: int
    headers: dict[str, str]
    body: bytes
    count: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @classmethod
    def read(cls, raw: bytes) -> Answer:
        head, _, rest = raw.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
        body = rest[: int(headers.get("content-length", len(rest)))]
        return cls(int(line.split()[1]), headers, body, len(re.findall(rb"^HTTP/1\.1 [2-5]", raw, re.MULTILINE)))


MISFRAMED = {
    "a bad size": b"zz\r\nabc\r\n0\r\n\r\n",
    "a negative size": b"-3\r\nabc\r\n0\r\n\r\n",
    "no size": b"\r\nabc\r\n0\r\n\r\n",
    "a size beyond all": b"f" * 40 + b"\r\nabc",
    "a long extension": b"3;" + b"x" * 20_000,
    "a bad extension": b"3; =\r\nabc\r\n0\r\n\r\n",
    "no end of a chunk": b"3\r\nabcdef\r\n0\r\n\r\n",
    "a bad trailer": b"0\r\nno colon\r\n\r\n",
    "a forbidden trailer": b"0\r\nContent-Length: 5\r\n\r\n",
    "bare line feeds": b"3\nabc\n0\n\n",
}
CUT_SHORT = {
    "a chunk": b"ff\r\nabc",
    "the last chunk": b"3\r\nabc\r\n",
    "the trailer": b"3\r\nabc\r\n0\r\nA: b\r\n",
}


def gunicorn_command(port: int, socket_path: Path, *options: str) -> list[str]:
    """Return the command of `docs/production.md` with another address and `options` appended."""
    (line,) = re.findall(r"^gunicorn (.*)$", documents.read("docs/production.md"), re.MULTILINE)
    *arguments, target = line.split()
    arguments[arguments.index("--bind") + 1] = f"127.0.0.1:{port}"
    program = str(Path(sys.executable).with_name("gunicorn"))
    return [program, *arguments, "--bind", f"unix:{socket_path}", *options, target]


def waitress_command(port: int, _socket_path: Path) -> list[str]:
    """Return the second command of `docs/production.md` with another address."""
    found = re.search(r"^waitress-serve (.*?:app)$", documents.read("docs/production.md"), re.MULTILINE | re.DOTALL)
    assert found
    program = str(Path(sys.executable).with_name("waitress-serve"))
    return [program, *found[1].replace("\\\n", "").replace("127.0.0.1:8000", f"127.0.0.1:{port}").split()]


def local_command(port: int, _socket_path: Path, *options: str) -> list[str]:
    """Return a command that runs the server of `aijobs up`; `options` such as `channel_timeout=1` override its own."""
    return [sys.executable, "-m", "tests.web.server.local", str(port), *options]


Command = Callable[[int, Path], list[str]]


class WebServer:
    """A running web process."""

    def __init__(
        self, processes: Processes, folder: Path, database_url: str, redis_url: str, command: Command, **env: str
    ) -> None:
        self.port, self.socket_path, self.database_url = free_port(), folder / "web.sock", database_url
        env = env | {
            "AIJOBS_ENV": "production",
            "AIJOBS_INSTANCE_PATH": str(folder),
            "AIJOBS_DATABASE_URL": database_url,
            "AIJOBS_REDIS_URL": redis_url,
            "AIJOBS_SECRET_KEY": "s" * 32,
            "AIJOBS_MESSAGE_KEYS": f"k1:{'m' * 32}",
            "AIJOBS_CREDENTIAL_KEYS": f"k1:{'c' * 32}",
            "AIJOBS_JWT_SECRET": "j" * 32,
            "AIJOBS_SERVICE_TOKEN": "t" * 32,
            "AIJOBS_USER_ACTIVE_JOBS": "0",
        }
        self.token = issue_user_token(Settings.load(env), "ana", hours=1)
        self.program = processes.spawn(command(self.port, self.socket_path), env=env, cwd=ROOT, name="web")
        poll(lambda: not self.program.is_running or self.answers(), timeout=60, what="it answers")
        assert self.program.is_running, self.program.output

    def answers(self) -> bool:
        """Return whether `/healthz` answers."""
        return answers(f"http://127.0.0.1:{self.port}", timeout_s=10)

    @contextmanager
    def connect(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            yield connection

    def ask(self, raw: bytes, *, unix: bool = False, then_close: bool = False) -> Answer:
        """Send bytes and return the answer; `then_close` half-closes the connection after them."""
        return Answer.read(self.send(raw, unix=unix, then_close=then_close))

    def send(self, raw: bytes, *, unix: bool = False, then_close: bool = False) -> bytes:
        """Send bytes and return what the server sends until it closes."""
        family, address = (
            (socket.AF_UNIX, str(self.socket_path)) if unix else (socket.AF_INET, ("127.0.0.1", self.port))
        )
        with socket.socket(family) as connection:
            connection.settimeout(30)
            connection.connect(address)
            connection.sendall(raw)
            if then_close:
                connection.shutdown(socket.SHUT_WR)
            return read_all(connection)

    def get(self, path: str, *headers: str, unix: bool = False) -> Answer:
        lines = [f"GET {path} HTTP/1.1", "Host: aijobs.example", *headers, "Connection: close", "", ""]
        return self.ask("\r\n".join(lines).encode("latin-1"), unix=unix)

    def head(self, path: str, *headers: str) -> bytes:
        """Return the head of a user's POST."""
        authorization = f"Authorization: Bearer {self.token}"
        content = "Content-Type: application/json"
        lines = [f"POST {path} HTTP/1.1", "Host: aijobs.example", authorization, content, *headers, "", ""]
        return "\r\n".join(lines).encode("latin-1")

    def count_jobs(self) -> int:
        engine = build_engine(self.database_url)
        try:
            with engine.connect() as connection:
                return connection.execute(select(func.count()).select_from(AiJob)).scalar_one()
        finally:
            engine.dispose()

    def errors(self) -> list[str]:
        """Return log lines at level error, and tracebacks."""
        return [
            line
            for line in self.program.output.splitlines()
            if re.search(r'"level": "error"|\[ERROR\]|Traceback', line)
        ]


def read_all(connection: socket.socket) -> bytes:
    """Read until the other end closes."""
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture(scope="module")
def start(run: Run, sqlite: SqliteDatabases, valkey: ValkeyServer) -> Iterator[Callable[..., WebServer]]:
    """`start(command, *options, **env)` starts a web process that lives as long as the tests of a module."""
    processes, urls = Processes(run), []

    def start(command: Callable[..., list[str]], *options: str, **env: str) -> WebServer:
        valkey.ensure_running()
        urls.append(sqlite.create_database(prepare_database))
        folder = run.new_folder("web")
        return WebServer(processes, folder, urls[-1], valkey.url, lambda *where: command(*where, *options), **env)

    yield start
    processes.stop_all()
    for url in urls:
        sqlite.drop_database(url)
