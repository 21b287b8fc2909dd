"""Renew in the child of a fork what it must not share with its parent: connections, threads, and held locks.

Servers fork after they imported the application (gunicorn with `--preload`, uWSGI), and plug-ins fork inside a worker
(`multiprocessing`). The child has a copy of every object, and none of the parent's threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

T = TypeVar("T")

_RENEWALS: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
_LOCKS: WeakSet[Any] = WeakSet()
_LEFT_BEHIND: list[object] = []


def renew_in_child(owner: T, renew: Callable[[T], None]) -> None:
    """Call `renew(owner)` in each child of a fork, as long as `owner` exists. `renew` must not refer to `owner`."""
    _RENEWALS[owner] = renew


def new_lock() -> threading.Lock:
    """Return a lock that is free in the child of a fork, even if a thread of the parent held it."""
    lock = threading.Lock()
    _LOCKS.add(lock)
    return lock


def leave_behind(*inherited: object) -> None:
    """Keep inherited objects alive that a child must not use: their finalizers would close the parent's connections."""
    _LEFT_BEHIND.extend(inherited)


def _renew_all() -> None:
    for lock in list(_LOCKS):
        lock._at_fork_reinit()
    for owner, renew in list(_RENEWALS.items()):
        renew(owner)


os.register_at_fork(after_in_child=_renew_all)
