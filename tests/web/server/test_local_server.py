"""The server of `aijobs up`: slow clients, forwarded headers, and a stop during a request."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from aijobs.db.engines import build_engine
from tests.support.processes import Processes
from tests.web.server.conftest import (
    CUT_SHORT,
    MISFRAMED,
    NOTES,
    Answer,
    WebServer,
    local_command,
    read_all,
    waitress_command,
)

CARDS = "/api/learning/flashcards"
CHUNKED = "Transfer-Encoding: chunked"
TOO_LITTLE = f"Content-Length: {len(NOTES) + 9}"


@pytest.fixture(scope="module")
def server(start: Callable[..., WebServer]) -> WebServer:
    return start(local_command, "channel_timeout=600")


@pytest.fixture(autouse=True)
def no_error_is_logged(server: WebServer) -> Iterator[None]:
    before = len(server.errors())
    yield
    assert not server.errors()[before:]


def is_open(connection: socket.socket) -> bool:
    """Return whether the server has neither answered nor closed."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


# --- slow clients ----------------------------------------------------------------------------------------------


def test_slow_and_silent_clients_do_not_delay_others(server: WebServer) -> None:
    with ExitStack() as opened:
        slow = [opened.enter_context(server.connect()) for _ in range(12)]
        silent = [opened.enter_context(server.connect()) for _ in range(200)]
        whole = server.head(CARDS, TOO_LITTLE) + NOTES
        chunked = server.head(CARDS, CHUNKED) + b"40\r\n" + b"x" * 40
        for number, connection in enumerate(slow):
            connection.sendall((whole[:40], whole, chunked)[number % 3])
        for _ in range(3):
            for connection in slow:
                connection.sendall(b" ")
            assert server.answers()
            assert server.get("/console/login").status == 200
        assert all(is_open(connection) for connection in [*slow, *silent])


@pytest.mark.long
def test_incomplete_request_is_closed_after_the_timeout(start: Callable[..., WebServer]) -> None:
    server = start(local_command, "channel_timeout=1", "cleanup_interval=1")
    for sent in (b"", b"GET /heal", server.head(CARDS, TOO_LITTLE) + NOTES, server.head(CARDS, CHUNKED) + b"ff\r\nabc"):
        assert server.send(sent) == b""
    assert server.count_jobs() == 0
    assert not server.errors()


def test_connections_beyond_the_limit_are_logged_once(start: Callable[..., WebServer]) -> None:
    server = start(local_command, "connection_limit=5", "threads=1")
    for _ in range(3):
        with ExitStack() as opened:
            connections = [opened.enter_context(server.connect()) for _ in range(9)]
            for connection in connections:
                connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert all(read_all(connection).startswith(b"HTTP/1.0 200 ") for connection in connections)
    lines = [line for line in server.program.output.splitlines() if '"logger": "waitress' in line]
    assert [("connection limit" in line) for line in lines] == [True]


# --- bodies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [*MISFRAMED.values(), *CUT_SHORT.values()], ids=[*MISFRAMED, *CUT_SHORT])
def test_misframed_body_creates_no_job(server: WebServer, body: bytes) -> None:
    before = server.count_jobs()
    raw = server.send(server.head(CARDS, CHUNKED) + body, then_close=True)
    assert raw == b"" or Answer.read(raw).status == 400
    assert server.count_jobs() == before


def test_body_that_is_cut_short_creates_no_job(server: WebServer) -> None:
    before = server.count_jobs()
    assert server.send(server.head(CARDS, TOO_LITTLE) + NOTES, then_close=True) == b""
    assert server.count_jobs() == before


@pytest.mark.parametrize("framing", [f"Content-Length: {len(NOTES)}", CHUNKED], ids=["length", "chunks"])
def test_complete_request_creates_a_job_with_any_framing(server: WebServer, framing: str) -> None:
    chunked = b"%x;ext=1\r\n%b\r\n0\r\nX-Trailer: y\r\n\r\n" % (len(NOTES), NOTES)
    body = chunked if framing == CHUNKED else NOTES
    assert server.ask(server.head(CARDS, framing, "Connection: close") + body).status == 202


def test_too_large_body_gets_an_api_error(server: WebServer) -> None:
    answer = server.ask(server.head(CARDS, "Content-Length: 1000001", "Connection: close") + b"x" * 1_000_001)
    assert (answer.status, answer.json["error"]["code"]) == (413, "PAYLOAD_TOO_LARGE")


# --- headers and paths -----------------------------------------------------------------------------------------


def test_forwarded_headers_are_ignored_by_the_server_without_trusted_proxies(server: WebServer) -> None:
    assert server.get("/healthz", "SCRIPT_NAME: /x", "PATH_INFO: /internal").status == 200
    assert "strict-transport-security" not in server.get("/healthz", "X-Forwarded-Proto: https").headers
    for header in ("SCRIPT_NAME: //evil.example", "X-Forwarded-Prefix: /evil", "X-Forwarded-Host: evil.example"):
        assert server.get("/", header).headers["location"] == "/console/"


@pytest.mark.parametrize("command", [local_command, waitress_command])
def test_trusted_proxy_sets_scheme_and_prefix(
    start: Callable[..., WebServer], command: Callable[..., list[str]]
) -> None:
    server = start(command, AIJOBS_TRUSTED_PROXIES="1")
    answer = server.get("/", "X-Forwarded-Proto: https", "X-Forwarded-Prefix: /aijobs")
    assert answer.headers["location"] == "/aijobs/console/"
    assert "strict-transport-security" in answer.headers
    assert server.program.stop(signal.SIGINT) == 0


@pytest.mark.parametrize(
    "path", ["//healthz", "///healthz", "/%2fhealthz", "//healthz?x=/healthz", "http://evil.example//healthz"]
)
def test_path_with_doubled_slashes_is_not_found(server: WebServer, path: str) -> None:
    """A proxy's rule for `/internal/` may not match `//internal/`, which waitress turns into `/internal/`."""
    assert server.get(path).status == 404


# --- start and end ---------------------------------------------------------------------------------------------


def test_refusal_to_start_is_one_line_and_exit_code_3(processes: Processes, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aijobs.web.local_server", "0"]
    program = processes.spawn(command, env={"AIJOBS_INSTANCE_PATH": str(tmp_path), "AIJOBS_ENV": "development"})
    assert program.wait(30) == 3
    assert program.output.count("\n") == 1
    assert program.output.startswith("aijobs: ")


def test_stop_waits_for_a_running_request_but_not_for_idle_clients(start: Callable[..., WebServer]) -> None:
    server = start(local_command)
    engine = build_engine(server.database_url)
    with server.connect(), server.connect() as asking, closing(engine.raw_connection()) as other:
        other.cursor().execute("BEGIN IMMEDIATE")
        asking.sendall(server.head(CARDS, f"Content-Length: {len(NOTES)}", "Connection: close") + NOTES)
        assert server.answers()  # Its request is read after the POST, which waits for the database on a thread.
        server.program.send_signal(signal.SIGTERM)
        other.rollback()
        assert Answer.read(read_all(asking)).status == 202
    engine.dispose()
    assert server.program.wait(30) == 0
    assert not server.errors()
