"""Free ports for the servers of tests."""

from __future__ import annotations

import random
import socket

# Below the range of outgoing connections, so that none of them takes a server's port while it restarts.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
