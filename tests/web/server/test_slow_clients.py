"""Clients that send slowly, or nothing, or don't read: others are answered meanwhile, and nobody holds on for ever."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.polling import poll
from tests.web.server.conftest import NOTES, Answer, WebServer, read_all
from tests.web.server.workers import Patient

CARDS = "/api/learning/flashcards"


@pytest.fixture(scope="module")
def patient(start_web: Callable[..., WebServer]) -> WebServer:
    """Waits for slow clients longer than any test lasts, with two threads."""
    return start_web("--worker-class", "tests.web.server.workers.Patient", "--threads", "2")


@pytest.fixture(scope="module")
def hasty(start_web: Callable[..., WebServer]) -> WebServer:
    """Gives up on slow clients after half a second."""
    return start_web("--worker-class", "tests.web.server.workers.Hasty", "--threads", "2")


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def is_open(connection: socket.socket) -> bool:
    """Whether the server has neither answered nor closed."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def test_health_is_answered_while_more_clients_than_threads_send_slowly(
    patient: WebServer, connections: ExitStack
) -> None:
    slow = [connections.enter_context(patient.connect()) for _ in range(12)]
    body = patient.head(CARDS, f"Content-Length: {len(NOTES)}") + NOTES
    chunked = patient.head(CARDS, "Transfer-Encoding: chunked") + b"40\r\n" + b"x" * 40
    for number, connection in enumerate(slow):
        connection.sendall((body[:40], body[:-5], chunked)[number % 3])
    for _ in range(3):
        for connection in slow:
            connection.sendall(b" ")
        assert patient.answers()
    assert [is_open(connection) for connection in slow] == [True] * 12


def test_health_is_answered_while_idle_clients_fill_all_the_room(patient: WebServer, connections: ExitStack) -> None:
    idle = [connections.enter_context(patient.connect()) for _ in range(5 * Patient.most_incoming)]
    assert patient.answers()
    still = poll(
        lambda: (left := sum(map(is_open, idle))) <= Patient.most_incoming and left, what="the oldest were closed"
    )
    assert still >= Patient.most_incoming - 1
    assert is_open(idle[-1])


def test_health_is_answered_while_clients_keep_answered_connections_open(
    patient: WebServer, connections: ExitStack
) -> None:
    """A connection that is to be closed is one whose client has to close too."""
    for _ in range(6):
        connection = connections.enter_context(patient.connect())
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.0 200 ")
        assert patient.answers()


def test_request_whose_rest_never_comes_is_answered_as_incomplete(hasty: WebServer) -> None:
    before = hasty.count_jobs()
    answer = hasty.ask(hasty.head(CARDS, f"Content-Length: {len(NOTES) + 9}") + NOTES)
    assert (answer.status, answer.json["error"]["details"]) == (400, {"reason": "body_incomplete"})
    assert hasty.count_jobs() == before
    assert not hasty.errors()


@pytest.mark.parametrize("sent", [b"", b"GET /heal"], ids=["nothing", "a part of a head"])
def test_connection_without_a_head_is_closed_at_the_deadline(hasty: WebServer, sent: bytes) -> None:
    with hasty.connect() as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""


def test_byte_by_byte_does_not_prolong_the_deadline(hasty: WebServer) -> None:
    with hasty.connect() as connection:
        connection.sendall(hasty.head(CARDS, "Content-Length: 900000"))

        def sends_in_vain() -> bool:
            try:
                connection.sendall(b" ")
            except OSError:
                return True
            return not is_open(connection)

        poll(sends_in_vain, timeout=30, what="the server gave up")


def test_client_that_reads_nothing_is_left(hasty: WebServer) -> None:
    """Its answers fill what the kernel holds for it; then the thread goes on to others."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", hasty.port))
        connection.settimeout(1)
        asked = b"GET /static/vendor/htmx-2.0.11.min.js HTTP/1.1\r\nHost: h\r\n\r\n"

        def is_left() -> bool:
            try:
                connection.sendall(asked * 20)
            except TimeoutError:
                return False
            except OSError:
                return True
            return False

        poll(is_left, timeout=30, what="the server closed the connection")
    assert hasty.answers()
    assert not hasty.errors()


def test_stop_does_not_wait_for_idle_clients(start_web: Callable[..., WebServer]) -> None:
    server = start_web("--worker-class", "tests.web.server.workers.Patient", "--graceful-timeout", "600")
    with server.connect(), server.connect() as kept:
        kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
        assert Answer.read(kept.recv(65536)).status == 200
        assert server.program.stop(timeout=60) == 0
