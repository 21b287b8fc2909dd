"""The child process of a worker: it runs attempts that its parent has locked, one after another.

Started by `aijobs.engine.child`. The parent renews the lease, and kills this process to stop an attempt.
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


def main(end: int, lifeline: int) -> NoReturn:
    """Take attempts from the connection `end` until the parent exits, which closes the `lifeline`."""
    _end_with_parent(lifeline)
    os.set_inheritable(end, False)
    # A worker that stops lets its attempts end first. A handler, because processes that an attempt starts would inherit
    # ignored signals.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with suppress(OSError):  # Not on Linux.
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(end)
    # Only now: from here on no signal can end this process, and it can't outlive its parent.
    from aijobs.wiring.engine import build_child_runner

    run = build_child_runner()
    own_pid = os.getpid()
    _send(connection, {"ready": True})
    while True:
        order = json.loads(_receive(connection))
        token = order["lease"][1]
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(order["alarm"])  # If the parent can't kill it, the kernel does.
        _send(connection, {"token": token, "begun": True})
        answer = run(order)
        if os.getpid() != own_pid:  # The job's code forked, and its copy returned here too.
            os._exit(0)
        signal.alarm(0)
        _send(connection, {"token": token, **answer})


def _end_with_parent(lifeline: int) -> None:
    """Exit, with all that its jobs have started, when the lifeline is closed, which only the parent's end does.

    The kernel signals the group (SIGIO, which ends a process), for code that lets no thread of Python run.
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_wait_for_parent, args=(lifeline,), name="parent", daemon=True).start()


def _wait_for_parent(lifeline: int) -> None:
    while os.read(lifeline, 1):
        continue
    os._exit(0)


def _receive(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        sys.exit(0)


def _send(connection: Connection, message: Any) -> None:
    try:
        connection.send_bytes(json.dumps(message).encode())
    except OSError:
        sys.exit(0)
