"""Polling with a deadline instead of a sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def poll(until: Callable[[], T], *, timeout: float = 10.0, interval: float = 0.02, what: str = "") -> T:
    """Call `until` until it returns a true value, and return that value.

    `timeout` and `interval` are seconds. Exceptions of `until` are not caught, so that a broken probe
    fails at once. After the timeout, raises an AssertionError with `what` (or the function's name) and the last value.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = until()
        if value:
            return value
        if time.monotonic() >= deadline:
            name = what or getattr(until, "__qualname__", repr(until))
            raise AssertionError(f"not within {timeout:g} s: {name}; last value: {value!r}")
        time.sleep(interval)
