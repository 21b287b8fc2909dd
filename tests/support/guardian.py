"""Ends what a test process started, should that process die before it could do so itself.

Run as a program, in a session of its own. It reads one order a line on its standard input: `+PGID` (a
process group was started), `-PGID` (it has ended), `d PATH` (a folder to remove). When the pipe closes,
be it by a polite end, by Ctrl-C or by kill -9, it ends the groups that are left and removes the folders.
It imports the standard library alone, so that it starts fast.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

GRACE_S = 3.0


def _signal_all(groups: set[int], signal_number: int) -> set[int]:
    """Send a signal to each group and return the groups that were still there."""
    alive = set()
    for group in groups:
        try:
            os.killpg(group, signal_number)
        except ProcessLookupError:
            continue
        alive.add(group)
    return alive


def _remove(folder: str) -> None:
    """Remove a folder, again for as long as something that is about to end still writes into it."""
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
