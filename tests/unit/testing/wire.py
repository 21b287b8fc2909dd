"""A client that records the bytes on the wire and how the connection ends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 40.0
"""For a busy machine: the Chinese dictionary alone takes a second on an idle one."""
QUIET_S = 0.15
_LOOK_S = 0.02

Body = Mapping[str, Any]


@dataclass
class Seen:
    """The received bytes and the end: `closed`, `reset`, or `open` if `until` was satisfied first."""

    raw: bytes
    end: str
    content: str = ""
    reasoning: str = ""
    refusal: str = ""
    finish_reason: str | None = None
    usage: Any = None
    events: list[Any] = field(default_factory=list)

    @property
    def head(self) -> str:
        return self.raw.partition(b"\r\n\r\n")[0].decode("latin-1")

    @property
    def status(self) -> int | None:
        return int(self.head.split()[1]) if self.raw else None

    def header(self, name: str) -> str | None:
        lines = (line.partition(":") for line in self.head.split("\r\n")[1:])
        return next((value.strip() for found, _, value in lines if found.lower() == name.lower()), None)

    @property
    def chunked(self) -> bool:
        return self.header("Transfer-Encoding") == "chunked"

    @property
    def body(self) -> bytes:
        """The body so far, without its chunk framing."""
        rest = self.raw.partition(b"\r\n\r\n")[2]
        if not self.chunked:
            return rest
        found = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size or b"0", 16)
            found, rest = found + rest[:length], rest[length + 2 :]
        return found

    @property
    def whole(self) -> bool:
        """Whether the body is complete according to its head."""
        if self.chunked:
            return self.raw.endswith(b"0\r\n\r\n")
        return len(self.body) == int(self.header("Content-Length") or -1)

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    url: str,
    body: Body,
    *,
    key: str = "sk-test-0123456789",
    until: Callable[[bytes], bool] | None = None,
    then_quiet: bool = False,
) -> Seen:
    """Post a chat completion and read until the other side closes, or `until` is satisfied."""
    with send(url, body, key=key) as connection:
        return receive(connection, until, then_quiet=then_quiet)


def send(url: str, body: Body, *, key: str = "sk-test-0123456789", path: str = "/chat/completions") -> socket.socket:
    """Send a request and return its connection, from which nothing was read yet."""
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=DEADLINE_S)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return connection


def receive(
    connection: socket.socket, until: Callable[[bytes], bool] | None = None, *, then_quiet: bool = False
) -> Seen:
    """Read from a connection; with `then_quiet`, until `until` is satisfied and nothing more arrives for a while."""
    deadline = time.monotonic() + DEADLINE_S
    pieces: list[bytes] = []
    while time.monotonic() < deadline:
        there = until is not None and until(b"".join(pieces))
        if there and not then_quiet:
            return Seen(b"".join(pieces), "open")
        connection.settimeout(QUIET_S if there else _LOOK_S)
        try:
            piece = connection.recv(1 << 20)
        except TimeoutError:
            if there:
                return Seen(b"".join(pieces), "open")
            continue
        except ConnectionResetError:
            return Seen(b"".join(pieces), "reset")
        if not piece:
            return Seen(b"".join(pieces), "closed")
        pieces.append(piece)
    raise AssertionError(f"no end within {DEADLINE_S:g} s: {b''.join(pieces)[:500]!r}")


def read_completion(seen: Seen, *, stream: bool) -> Seen:
    """Return `seen` with content, finish reason and usage of its completion."""
    if not stream:
        answer = seen.json()
        choice = answer["choices"][0]
        message = choice["message"] or {}
        seen.content, seen.reasoning = message.get("content") or "", message.get("reasoning_content", "")
        seen.refusal, seen.finish_reason = message.get("refusal", ""), choice["finish_reason"]
        seen.usage, seen.events = answer.get("usage"), [answer]
        return seen
    for block in seen.body.decode("utf-8", "surrogateescape").split("\n\n"):
        data = block.removeprefix("data: ")
        if not block.startswith("data: ") or data == "[DONE]":
            continue
        one = json.loads(data)
        seen.events.append(one)
        seen.usage = one.get("usage") or seen.usage
        for choice in one.get("choices", ()):
            delta = choice["delta"] or {}
            seen.content += delta.get("content") or ""
            seen.reasoning += delta.get("reasoning_content") or ""
            seen.refusal += delta.get("refusal") or ""
            seen.finish_reason = choice["finish_reason"] or seen.finish_reason
    return seen
