"""A program that ends the processes of a test process if that dies first.

It runs in its own session and reads one order per line from standard input: `+PGID` (a process group was
started), `-PGID` (it has ended), `d PATH` (a folder to remove). When the pipe closes, after a normal end,
Ctrl-C or kill -9, it ends the remaining groups and removes the folders. It imports only the standard
library, so that it starts fast.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

GRACE_S = 3.0


def _signal_all(groups: set[int], signal_number: int) -> set[int]:
    """Send a signal to each group and return the groups that still existed."""
    alive = set()
    for group in groups:
        try:
            os.killpg(group, signal_number)
        except ProcessLookupError:
            continue
        alive.add(group)
    return alive


def _remove(folder: str) -> None:
    """Remove a folder, and try again for `GRACE_S` while an ending process still writes into it."""
    deadline = time.monotonic() + GRACE_S
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


def main() -> None:
    groups: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        order, value = line[0], line[1:].strip()
        if order == "+":
            groups.add(int(value))
        elif order == "-":
            groups.discard(int(value))
        elif order == "d":
            folders.append(value)
    groups = _signal_all(groups, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while groups and time.monotonic() < deadline:
        time.sleep(0.05)
        groups = _signal_all(groups, 0)
    _signal_all(groups, signal.SIGKILL)
    for folder in folders:
        _remove(folder)


if __name__ == "__main__":
    main()
