"""One answer on the wire: headers, pieces, waits that notice a client's end, and broken connections."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

from aijobs.testing.fakellm.ledger import Call, Ledger
from aijobs.testing.fakellm.request import Request

_LOOK_S = 0.05
_NO_LINGER = struct.pack("ii", 1, 0)


class ClientLeft(Exception):
    """The client closed the connection before the end of its answer."""


class ConnectionOver(Exception):
    """The step ended the connection, or the server stops: send nothing more."""


class Exchange:
    """What a step uses to answer. `write_content` makes the content of a good answer to a request."""

    def __init__(
        self,
        handler: BaseHTTPRequestHandler,
        request: Request,
        call: Call,
        ledger: Ledger,
        stopping: threading.Event,
        write_content: Callable[[Request], str],
        delta_s: float,
    ) -> None:
        self.request = request
        self.call = call
        self.write_content = write_content
        self.delta_s = delta_s
        self._handler = handler
        self._ledger = ledger
        self._stopping = stopping
        self._chunked = False

    @property
    def number(self) -> int:
        """The call's number in the log."""
        return self.call.number

    def count(self, usage: Mapping[str, Any] | None) -> None:
        """Record the usage that the call is billed."""
        self._ledger.note(self.call, usage=dict(usage) if usage is not None else None)

    def head(
        self, status: int, content_type: str, *, length: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Prepare status line and headers, which are sent with the first piece; a body of unknown `length` is sent in
        chunks.
        """
        handler = self._handler
        handler.send_response_only(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("X-Request-Id", f"fake-{self.number}")
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        self._chunked = length is None
        if length is None:
            handler.send_header("Transfer-Encoding", "chunked")
            handler.send_header("Cache-Control", "no-cache")
        else:
            handler.send_header("Content-Length", str(length))
        handler.end_headers()
        self._ledger.note(self.call, status=status)

    def write(self, piece: bytes) -> None:
        """Send a piece of the body at once. Raises `ClientLeft`."""
        if self._has_left():
            raise ClientLeft
        self._send(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked and piece else piece)

    def finish(self) -> None:
        """End the body properly."""
        self._send(b"0\r\n\r\n" if self._chunked else b"")

    def body(self, status: int, content_type: str, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer."""
        self.head(status, content_type, length=len(content), headers=headers)
        self._send(content)

    def wait(self, seconds: float | None) -> None:
        """Send pending data and wait so long (None: for ever).

        `ClientLeft` as soon as the client leaves, `ConnectionOver` when the server stops.
        """
        self._send(b"")
        until = None if seconds is None else time.monotonic() + seconds
        while until is None or (left := until - time.monotonic()) > 0:
            if self._stopping.is_set():
                self.close()
            if self._has_left(_LOOK_S if until is None else min(left, _LOOK_S)):
                raise ClientLeft

    def reset(self) -> None:
        """End the connection with RST, and the exchange with `ConnectionOver`."""
        self._send(b"")
        connection = self._handler.connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        # Closed here, because the server would send a FIN first.
        socket.close(connection.detach())
        self.close()

    def close(self) -> None:
        """End the connection as it is, and the exchange with `ConnectionOver`."""
        raise ConnectionOver

    def _send(self, data: bytes) -> None:
        try:
            self._handler.wfile.write(data)
            self._handler.wfile.flush()
        except OSError:
            raise ClientLeft from None

    def _has_left(self, wait_s: float = 0.0) -> bool:
        """Return whether the client closed the connection. Data that it sent stays readable."""
        connection = self._handler.connection
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        if not poller.poll(wait_s * 1000):
            return False
        try:
            if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                self._stopping.wait(wait_s)  # the next request has arrived already, so the check above didn't wait
                return False
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True
