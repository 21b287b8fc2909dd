"""Requests as bytes: misframed, cut short, or with headers that a server might trust."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.web.server.conftest import CUT_SHORT, MISFRAMED, NOTES, WebServer, gunicorn_command

CARDS = "/api/learning/flashcards"
CHUNKED = "Transfer-Encoding: chunked"


@pytest.fixture(scope="module")
def server(start: Callable[..., WebServer]) -> WebServer:
    return start(gunicorn_command)


@pytest.fixture(autouse=True)
def no_error_is_logged(server: WebServer) -> Iterator[None]:
    before = len(server.errors())
    yield
    assert not server.errors()[before:]


# --- bodies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CARDS, "/api/ai/credentials", "/api/ai/jobs/x/cancel"])
@pytest.mark.parametrize("body", MISFRAMED.values(), ids=MISFRAMED.keys())
def test_misframed_body_is_a_bad_request_with_a_reason(server: WebServer, path: str, body: bytes) -> None:
    answer = server.ask(server.head(path, CHUNKED) + body, then_close=True)
    assert (answer.status, answer.json["error"]["code"]) == (400, "BAD_REQUEST")
    assert answer.json["error"]["details"]["reason"] in ("body_malformed", "body_incomplete")
    assert answer.count == 1


@pytest.mark.parametrize("body", [*MISFRAMED.values(), *CUT_SHORT.values()], ids=[*MISFRAMED, *CUT_SHORT])
def test_misframed_sign_in_is_a_bad_request(server: WebServer, body: bytes) -> None:
    """Anybody can send one, without an account."""
    head = b"POST /console/login HTTP/1.1\r\nHost: h\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    answer = server.ask(head + f"{CHUNKED}\r\n\r\n".encode() + body, then_close=True)
    assert (answer.status, answer.count) == (400, 1)
    assert answer.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("body", CUT_SHORT.values(), ids=CUT_SHORT.keys())
def test_chunked_body_that_ends_early_is_incomplete(server: WebServer, body: bytes) -> None:
    answer = server.ask(server.head(CARDS, CHUNKED) + body, then_close=True)
    assert answer.status == 400
    assert answer.json["error"]["details"]["reason"] in ("body_malformed", "body_incomplete")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CARDS, NOTES),
        ("/api/ai/credentials", b'{"key": "sk-0123456789"}'),
        ("/api/ai/jobs/01a22f96-c9c2-7168-ab45-089b7a47b5d4/cancel", b"{}"),
        ("/api/ai/jobs/01a22f96-c9c2-7168-ab45-089b7a47b5d4/cancel", b""),
    ],
)
def test_request_that_is_cut_short_is_incomplete_and_changes_nothing(server: WebServer, path: str, body: bytes) -> None:
    """The part that arrives is a valid document."""
    before = server.count_jobs()
    answer = server.ask(server.head(path, f"Content-Length: {len(body) + 9}") + body, then_close=True)
    assert answer.status == 400
    assert answer.json["error"]["details"] == {"reason": "body_incomplete"}
    assert server.count_jobs() == before


def test_console_form_that_is_cut_short_is_a_bad_request(server: WebServer) -> None:
    for path in ("login", "logout", "preferences"):
        head = f"POST /console/{path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/x-www-form-urlencoded\r\n"
        answer = server.ask(f"{head}Content-Length: 50\r\n\r\nlanguage=zh".encode(), then_close=True)
        assert answer.status == 400, path


@pytest.mark.parametrize(
    "framing",
    [
        lambda body: ("Connection: close", f"Content-Length: {len(body)}"),
        lambda body: ("Connection: close", CHUNKED),
        lambda body: ("Connection: close", f"Content-Length: {len(body)}", "Expect: 100-continue"),
    ],
    ids=["length", "chunks", "continue"],
)
def test_complete_request_creates_a_job_with_any_framing(
    server: WebServer, framing: Callable[[bytes], tuple[str, ...]]
) -> None:
    headers = framing(NOTES)
    chunked = b"%x;ext=1\r\n%b\r\n0\r\nX-Trailer: y\r\n\r\n" % (len(NOTES), NOTES)
    with server.connect() as connection:
        connection.sendall(server.head(CARDS, *headers))
        if "Expect: 100-continue" in headers:
            assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        for byte in range(0, len(NOTES), 50):
            connection.sendall((chunked if CHUNKED in headers else NOTES)[byte : byte + 50])
        connection.sendall(chunked[(len(NOTES) + 49) // 50 * 50 :] if CHUNKED in headers else b"")
        assert connection.recv(65536).startswith(b"HTTP/1.1 202 ")


@pytest.mark.parametrize("headers", [("Content-Length: 1000001",), (CHUNKED,)], ids=["length", "chunks"])
def test_too_large_body_gets_one_answer(server: WebServer, headers: tuple[str, ...]) -> None:
    answer = server.ask(server.head(CARDS, *headers) + (b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n") * 20 + b"0\r\n\r\n")
    assert (answer.status, answer.count) == (413, 1)


def test_pipelined_requests_get_one_answer_each(server: WebServer) -> None:
    one = server.head(CARDS, f"Content-Length: {len(NOTES)}") + NOTES
    two = server.head(CARDS, f"Content-Length: {len(NOTES)}", "Connection: close") + NOTES
    answer = server.ask(one + two)
    assert (answer.status, answer.count) == (202, 2)


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 4", CHUNKED),
        ("Content-Length: 4", "Content-Length: 5"),
        ("Content-Length: 4, 5",),
        ("Content-Length: +4",),
        ("Content-Length : 4",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding : chunked",),
        (CHUNKED, CHUNKED),
        (CHUNKED, "Transfer-Encoding: identity"),
    ],
    ids=" ".join,
)
def test_request_with_an_ambiguous_length_is_refused_and_the_connection_closed(
    server: WebServer, headers: tuple[str, ...]
) -> None:
    """A proxy that reads another length would treat the rest as the next user's request."""
    before = server.count_jobs()
    hidden = server.head(CARDS, f"Content-Length: {len(NOTES)}") + NOTES
    answer = server.ask(server.head(CARDS, *headers) + b"0\r\n\r\n" + hidden)
    assert (answer.status in (400, 501), answer.count) == (True, 1)
    assert server.count_jobs() == before


def test_misframed_body_of_an_unknown_user_is_unauthorized(server: WebServer) -> None:
    head = b"POST /api/ai/credentials HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert server.ask(head + b"zz\r\n").status == 401


# --- headers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unix", [False, True], ids=["address", "socket"])
def test_forwarded_headers_are_ignored_by_the_server_without_trusted_proxies(server: WebServer, unix: bool) -> None:
    """Connections from 127.0.0.1 and a Unix socket, where proxies run, aren't trusted either."""
    resolve = "/static/internal/credentials/01a22f96-c9c2-7168-ab45-089b7a47b5d4/resolve"
    asked = (
        f"POST {resolve} HTTP/1.1\r\nHost: h\r\nSCRIPT_NAME: /static\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
    assert server.ask(asked.encode(), unix=unix).status in (400, 404, 405)
    assert server.get("/healthz", "SCRIPT_NAME: /x", "PATH_INFO: /internal", unix=unix).status == 200
    for header in ("X-Forwarded-Proto: https", "X-Forwarded-Protocol: ssl", "X-Forwarded-Ssl: on"):
        assert "strict-transport-security" not in server.get("/healthz", header, unix=unix).headers
    for header in ("SCRIPT_NAME: //evil.example", "X-Forwarded-Prefix: /evil", "X-Forwarded-Host: evil.example"):
        assert server.get("/", header, unix=unix).headers["location"] == "/console/"
    assert server.get("/healthz", "X-Forwarded-Proto: https", "X-Forwarded-Ssl: off", unix=unix).status == 200


@pytest.mark.parametrize(
    "path", ["/console", "/console/", "/", "//evil.example", "//evil.example/console", "/console//"]
)
def test_redirects_never_lead_to_the_host_of_a_request(server: WebServer, path: str) -> None:
    answer = server.get(path)
    assert answer.status in (302, 303, 404)
    assert answer.headers.get("location", "/console").startswith("/console")


@pytest.mark.parametrize(
    "path", ["/healthz/", "/healthz/x", "/healthz;x", "/healthz%00", "/./healthz", "//healthz", "/healthz%2f", "/%ff"]
)
def test_path_similar_to_the_health_check_is_not_found(server: WebServer, path: str) -> None:
    assert server.get(path).status == 404


def test_absolute_address_is_treated_as_its_path(server: WebServer) -> None:
    assert server.get("http://evil.example/healthz").status == 200


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: h\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\nHost: h\n\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    ],
    ids=["a long address", "a long header", "many headers", "bare line feeds", "TLS"],
)
def test_unreadable_head_is_refused(server: WebServer, raw: bytes, status: int) -> None:
    assert server.ask(raw).status == status
