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


def main(end: int, lifeline: int) -> NoReturn:
    """Take attempts over the connection `end`, until this process or its parent ends, which closes the `lifeline`."""
    _end_with_parent(lifeline)
    os.set_inheritable(end, False)
    # A worker process that is to stop lets its attempts end first. Not ignored: what an attempt starts would inherit
    # that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with suppress(OSError):  # Not on Linux.
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(end)
    # Loaded only now: from here on nothing that is signalled ends this process, or leaves it behind.
    from aijobs.wiring.engine import build_child_runner

    run = build_child_runner()
    own_pid = os.getpid()
    _say(connection, {"ready": True})
    while True:
        order = json.loads(_hear(connection))
        token = order["lease"][1]
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(order["alarm"])  # In case that nobody is left who would stop the attempt.
        _say(connection, {"token": token, "begun": True})
        answer = run(order)
        if os.getpid() != own_pid:  # The job's code forked, and its copy of this loop came back too.
            os._exit(0)
        signal.alarm(0)
        _say(connection, {"token": token, **answer})


def _end_with_parent(lifeline: int) -> None:
    """End this process, and what its jobs start, when the lifeline is closed, which only the parent's end does.

    The kernel signals its group (SIGIO, which nobody handles), for code that lets no thread of Python run.
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_wait_for_parent, args=(lifeline,), name="parent", daemon=True).start()


def _wait_for_parent(lifeline: int) -> None:
    while os.read(lifeline, 1):
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
