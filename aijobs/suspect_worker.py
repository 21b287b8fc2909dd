"""The child in which suspects run: it takes attempts that its parent has locked, one after another.

Started by `aijobs.engine.child`. The parent holds and renews the lease, and kills this process to stop an attempt.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn


def main(end: int) -> NoReturn:
    """Take attempts over the connection `end`, until this process or its parent ends."""
    _end_with_parent()
    os.set_inheritable(end, False)
    # A worker process that is to stop lets its attempts end first. Not ignored: what an attempt starts would inherit
    # that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with suppress(OSError):  # Not on Linux.
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(end)
    # Loaded only now: from here on nothing that is signalled ends this process, or leaves it behind.
    from aijobs.wiring import build_suspect_runner

    run = build_suspect_runner()
    _say(connection, {"ready": True})
    while True:
        order = json.loads(_hear(connection))
        _say(connection, {"begun": True})
        _say(connection, run(order))


def _end_with_parent() -> None:
    """End this process, and what its jobs start, when its standard input is closed, which only the parent's end does.

    The kernel signals its group (SIGIO, which nobody handles), for code that lets no thread of Python run.
    """
    fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_wait_for_parent, name="parent", daemon=True).start()


def _wait_for_parent() -> None:
    while os.read(0, 1):
        continue
    os._exit(0)


def _hear(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        sys.exit(0)


def _say(connection: Connection, message: Any) -> None:
    try:
        connection.send_bytes(json.dumps(message).encode())
    except OSError:
        sys.exit(0)
