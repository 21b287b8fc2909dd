"""Clients that never finish their request hold the web process for a while, and not for good."""

from __future__ import annotations

import os
import socket

from aijobs.local.station import RECEIVE_TIMEOUT_S, listen


def test_a_connection_that_says_nothing_more_is_given_up() -> None:
    with listen("127.0.0.1", 0, may_differ=False) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            accepted.setblocking(True)
            seconds = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
            assert int.from_bytes(seconds[:8], "little") == RECEIVE_TIMEOUT_S
            accepted.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
            )
            try:
                os.read(accepted.fileno(), 1)
            except BlockingIOError:
                return
    raise AssertionError("the read waits for ever")
