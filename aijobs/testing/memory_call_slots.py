"""The slots of provider calls in memory. They pass the conformance tests of those in Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from aijobs.ai.calling.slots import UNLIMITED
from aijobs.ids import new_id


class MemoryCallSlots:
    """Set `away` to have it count nothing, like an unreachable Redis. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self.away = clock, False
        self._guard = threading.Lock()
        self._held: dict[tuple[str, int], tuple[str, float]] = {}

    def take(self, provider: str, limit: int, lease_s: float) -> str | None:
        """See `CallSlots.take`."""
        if limit <= 0 or self.away:
            return UNLIMITED
        with self._guard:
            free = next((number for number in range(limit) if not self._taken(provider, number)), None)
            if free is None:
                return None
            token = f"{free}/{new_id()}"
            self._held[provider, free] = token, self._clock() + lease_s
            return token

    def release(self, provider: str, token: str) -> None:
        """See `CallSlots.release`."""
        with self._guard:
            for slot, (holder, _) in list(self._held.items()):
                if slot[0] == provider and holder == token and not self.away:
                    del self._held[slot]

    def in_use(self, provider: str, limit: int) -> int | None:
        """See `CallSlots.in_use`."""
        if limit <= 0 or self.away:
            return None
        with self._guard:
            return sum(self._taken(provider, number) for number in range(limit))

    def _taken(self, provider: str, number: int) -> bool:
        return self._clock() < self._held.get((provider, number), ("", 0.0))[1]
