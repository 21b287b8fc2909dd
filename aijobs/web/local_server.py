"""The web process of `aijobs up`: waitress, which receives whole requests before a thread takes them.

`python -m aijobs.web.local_server FD` serves on a listening socket of its parent. After SIGTERM it finishes running
requests. Like gunicorn with `aijobs.web.server`, it trusts no header.
"""

from __future__ import annotations

import signal
import socket
import sys
from typing import Any, NoReturn

from flask import Flask
from waitress.server import create_server

GRACE_S = 10
_WAITRESS_GRACE_S = 5
"""How long waitress waits for running requests at its end."""

OPTIONS: dict[str, Any] = {
    "threads": 8,
    "connection_limit": 400,  # Each may also hold a temporary file, and a process usually may have 1,024 open files.
    "asyncore_use_poll": True,
    "channel_timeout": 20,
    "cleanup_interval": 5,
    "clear_untrusted_proxy_headers": False,  # `aijobs.web.forwarded` reads them; waitress trusts none.
    "log_socket_errors": False,
}


def serve(app: Flask, listener: socket.socket, **options: Any) -> None:
    """Serve until SIGTERM. `options` override `OPTIONS`."""
    # Above our own limit, so that a body that is a little too large gets the application's answer.
    body_limit = 2 * app.config["MAX_CONTENT_LENGTH"]
    server = create_server(app, sockets=[listener], max_request_body_size=body_limit, **(OPTIONS | options))
    signal.signal(signal.SIGTERM, _stop)
    server.run()
    server.task_dispatcher.shutdown(timeout=GRACE_S - _WAITRESS_GRACE_S)


def _stop(*_: object) -> NoReturn:
    """End waitress's loop."""
    raise SystemExit(0)


def main() -> None:
    """Serve on the file descriptor of the command line. Exit with 3 and one line if the application refuses to
    start.
    """
    from aijobs.web.wsgi import app

    serve(app, socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
