"""A forked child process, for tests of what it must not share with its parent."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.polling import poll


@contextmanager
def forked(act: Callable[[], object]) -> Iterator[None]:
    """Run `act` in a forked child while the block runs here. Fails if `act` raises or runs longer than 20 s."""
    with warnings.catch_warnings():
        # Newer Pythons warn of a fork in a process with threads, which is what these tests are about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        yield
        ended, status = poll(lambda: _ended(child), timeout=20, what="the child ended")
        child = 0
        assert os.waitstatus_to_exitcode(status) == 0, f"the child {ended} failed: see what it printed"
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _ended(child: int) -> tuple[int, int] | None:
    found = os.waitpid(child, os.WNOHANG)
    return found if found[0] else None
