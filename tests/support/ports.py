"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket

# Below the range from which systems take ports for outgoing connections, so that no such connection
# sits on a server's port while the server restarts.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nobody listens."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
