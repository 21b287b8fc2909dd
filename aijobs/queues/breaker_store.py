"""The state of the circuit breakers in Redis, shared by all workers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from aijobs.queues.shared_texts import SharedTexts

PREFIX = "aijobs:breaker:"


class RedisBreakerStore:
    """See `aijobs.ai.calling.breaker.BreakerStore`. The time is Redis's, so that workers' clocks don't matter."""

    def __init__(self, texts: SharedTexts) -> None:
        self._texts = texts

    def read(self, scopes: Sequence[str]) -> tuple[int, list[str | None]]:
        """See `BreakerStore.read`. One round trip for all scopes."""
        return self._texts.read_with_time([PREFIX + scope for scope in scopes])

    def swap(self, scope: str, seen: str | None, new: str | None, keep: timedelta) -> bool:
        """See `BreakerStore.swap`. WATCH lets one of two writers that saw the same text succeed."""
        return self._texts.swap(PREFIX + scope, seen, new, keep)
