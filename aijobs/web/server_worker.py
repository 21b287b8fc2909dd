"""gunicorn's threaded worker, with requests received before a thread takes them.

gunicorn itself gives each connection to a thread at once: a few clients that send slowly, or nothing, hold them all.
Here the main loop receives every request, within one deadline for the whole of it, and a thread reads from memory. What
is given up on is cut off, so that no thread ever waits for a client to send.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from gunicorn.http import get_parser
from gunicorn.http.errors import ParseException
from gunicorn.workers.gthread import TConn, ThreadWorker

from aijobs.web.incoming import Incoming, State

_PIECE = 65536
_LINGER_S = 2.0
"""How long a closed connection's rest is read, so that the client sees the answer and no reset."""
_MOST_CLOSING = 100
_BODIES = 64
"""How many bodies of the largest size all connections together may hold in memory."""


class BufferingWorker(ThreadWorker):
    """Set as gunicorn's `worker_class`. TLS ends before it: with gunicorn's own, connections go to threads at once."""

    receive_s = 20.0
    """For a whole request, from its connection or its first byte on."""
    answer_s = 20.0
    """For each piece of an answer to be taken by the client."""
    most_incoming = 400
    """Connections whose request isn't here yet; the oldest goes for a new one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._incoming: dict[TConn, tuple[Incoming, float]] = {}  # In order of their deadlines.
        self._closing: dict[TConn, float] = {}
        self._held_bytes = 0

    # --- receiving, on the main thread ---------------------------------------------------------------------------

    def enqueue_req(self, conn: TConn) -> None:
        """Receive a request; every way to the threads leads through here."""
        if self.cfg.is_ssl:
            super().enqueue_req(conn)
            return
        body_limit = self.wsgi.config["MAX_CONTENT_LENGTH"]
        head_limit = self.cfg.limit_request_line + self.cfg.limit_request_fields * (
            self.cfg.limit_request_field_size + 2
        )
        incoming = Incoming(head_limit, body_limit)
        conn.sock.setblocking(False)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._receive, conn))
        self._incoming[conn] = incoming, time.monotonic() + self.receive_s
        if conn.parser is not None and (early := conn.parser.unreader.take_buffered()):
            self._add(conn, incoming, early)
        self._receive(conn)
        while len(self._incoming) > self.most_incoming or self._held_bytes > _BODIES * body_limit:
            self._drop(next(iter(self._incoming)))

    def _receive(self, conn: TConn, _file: Any = None) -> None:
        if conn not in self._incoming:
            return  # An event of the same round ended it.
        incoming, _ = self._incoming[conn]
        try:
            data = conn.sock.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._add(conn, incoming, data)
        else:
            self._give_up(conn)

    def _add(self, conn: TConn, incoming: Incoming, data: bytes) -> None:
        before = len(incoming.data)
        incoming.add(data)
        self._held_bytes += len(incoming.data) - before
        if incoming.state is not State.ARRIVING:
            self._hand_over(conn, cut=incoming.state is State.REFUSED)
        elif incoming.wants_continue:
            incoming.wants_continue = False
            with suppress(OSError):
                conn.sock.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _hand_over(self, conn: TConn, *, cut: bool) -> None:
        """Give a request to a thread; with `cut` whatever is missing reads as the end of the connection."""
        incoming = self._forget(conn)
        conn.reusable = incoming.state is State.WHOLE
        if cut:
            with suppress(OSError):
                conn.sock.shutdown(socket.SHUT_RD)
        if conn.parser is None:
            conn.parser = get_parser(self.cfg, conn.sock, conn.client)
            conn.initialized = True
        conn.parser.unreader.unread(bytes(incoming.data))
        super().enqueue_req(conn)

    def _give_up(self, conn: TConn) -> None:
        """Nothing more is waited for: a request with a head is answered, anything less is not."""
        if self._incoming[conn][0].has_head:
            self._hand_over(conn, cut=True)
        else:
            self._drop(conn)

    def murder_pending(self) -> None:
        """Called by gunicorn's loop once a second or more often, while it stops too."""
        now = time.monotonic()
        for conn, (incoming, deadline) in list(self._incoming.items()):
            if deadline <= now:
                self._give_up(conn)
            elif not self.alive and not incoming.data:
                self._drop(conn)
        for conn in [conn for conn, deadline in self._closing.items() if deadline <= now]:
            self._closed(conn)

    # --- answering, on a thread ----------------------------------------------------------------------------------

    def handle_request(self, req: Any, conn: TConn) -> Any:
        """Answer a request; a client that doesn't take the answer is left."""
        conn.sock.settimeout(self.answer_s)
        try:
            return super().handle_request(req, conn)
        except TimeoutError:
            raise BrokenPipeError(errno.EPIPE, "the client doesn't read") from None

    def _keepalive_after(self, conn: TConn, keepalive: Any) -> bool:
        if self.cfg.is_ssl:
            return bool(super()._keepalive_after(conn, keepalive))
        try:
            return conn.reusable and bool(super()._keepalive_after(conn, keepalive))
        except ParseException:
            return False  # A misframed body that nobody read; the answer has been sent.

    # --- closing, on the main thread -----------------------------------------------------------------------------

    def finish_request(self, conn: TConn, fs: Future[Any]) -> None:
        """Keep the connection for its next request, or close it. gunicorn would wait for the client here."""
        if not fs.cancelled() and fs.exception() is None and fs.result():
            super().finish_request(conn, fs)
            return
        self._closing[conn] = time.monotonic() + _LINGER_S
        try:
            conn.sock.setblocking(False)
            conn.sock.shutdown(socket.SHUT_WR)
            self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._discard, conn))
        except (OSError, ValueError):  # It is closed already.
            self._closed(conn)
        if len(self._closing) > _MOST_CLOSING:
            self._closed(next(iter(self._closing)))

    def _discard(self, conn: TConn, _file: Any = None) -> None:
        if conn not in self._closing:
            return
        try:
            more = bool(conn.sock.recv(_PIECE))
        except BlockingIOError:
            more = True
        except OSError:
            more = False
        if not more:
            self._closed(conn)

    def _closed(self, conn: TConn) -> None:
        del self._closing[conn]
        self._end(conn)

    def _drop(self, conn: TConn) -> None:
        self._forget(conn)
        self._end(conn)

    def _end(self, conn: TConn) -> None:
        self._unwatch(conn)
        self.nr_conns -= 1
        conn.close()

    # --- the poller ----------------------------------------------------------------------------------------------

    def _forget(self, conn: TConn) -> Incoming:
        incoming, _ = self._incoming.pop(conn)
        self._held_bytes -= len(incoming.data)
        self._unwatch(conn)
        return incoming

    def _unwatch(self, conn: TConn) -> None:
        with suppress(KeyError, ValueError):
            self.poller.unregister(conn.sock)
