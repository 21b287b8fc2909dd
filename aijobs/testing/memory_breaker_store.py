"""The circuit breakers' store in memory, with a clock moved by hand. It passes the conformance tests of the
Redis one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

from aijobs.errors import BrokerUnavailable


class MemoryBreakerStore:
    """Set `away` to have it fail like an unreachable Redis. `now_ms` is its clock."""

    def __init__(self) -> None:
        self.now_ms, self.away = 1_800_000_000_000, False
        self._guard = threading.Lock()
        self._texts: dict[str, tuple[str, int]] = {}

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now_ms += round(seconds * 1000)

    def read(self, scopes: Sequence[str]) -> tuple[int, list[str | None]]:
        """See `BreakerStore.read`."""
        with self._guard:
            self._reach()
            return self.now_ms, [self._text(scope) for scope in scopes]

    def swap(self, scope: str, seen: str | None, new: str | None, keep: timedelta) -> bool:
        """See `BreakerStore.swap`."""
        with self._guard:
            self._reach()
            if self._text(scope) != seen:
                return False
            if new is None:
                self._texts.pop(scope, None)
            else:
                self._texts[scope] = new, self.now_ms + round(keep.total_seconds() * 1000)
            return True

    def _text(self, scope: str) -> str | None:
        text, until = self._texts.get(scope, (None, 0))
        return text if self.now_ms < until else None

    def _reach(self) -> None:
        if self.away:
            raise BrokerUnavailable("broker: away")
