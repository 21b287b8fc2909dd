"""Short texts in Redis that all processes share and change atomically, for breakers and call slots.

No job depends on them, so nobody waits long for them: after an error none is read for some seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import redis

from aijobs.queues.connection import ImpatientClient


class SharedTexts:
    """Texts by key, each with an expiry. Every method raises `BrokerUnavailable`."""

    def __init__(self, client: ImpatientClient) -> None:
        self._ask = client.ask

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """Return the text of each key."""
        return [_text(value) for value in self._ask(lambda client: client.mget(keys))]

    def read_with_time(self, keys: Sequence[str]) -> tuple[int, list[str | None]]:
        """Return Redis's time in milliseconds, and the text of each key."""

        def ask(client: redis.Redis) -> tuple[int, list[str | None]]:
            pipeline = client.pipeline(transaction=False)
            pipeline.time()
            pipeline.mget(keys)
            (seconds, micros), values = pipeline.execute()
            return seconds * 1000 + micros // 1000, [_text(value) for value in values]

        return self._ask(ask)

    def add(self, key: str, text: str, keep: timedelta) -> bool:
        """Write a text if the key has none, and return whether it did."""
        return bool(self._ask(lambda client: client.set(key, text, nx=True, px=_px(keep))))

    def swap(self, key: str, seen: str | None, new: str | None, keep: timedelta) -> bool:
        """Write `new` (None: delete) if the text is still `seen`, and return whether it was."""

        def exchange(client: redis.Redis) -> bool:
            with client.pipeline() as pipeline:
                pipeline.watch(key)
                (value,) = pipeline.mget([key])  # Unlike GET, it reads a value of another type as none.
                if _text(value) != seen:
                    return False
                pipeline.multi()
                if new is None:
                    pipeline.delete(key)
                else:
                    pipeline.set(key, new, px=_px(keep))
                try:
                    pipeline.execute()
                except redis.WatchError:
                    return False
                return True

        return self._ask(exchange)


def _text(value: Any) -> str | None:
    return None if value is None else bytes(value).decode("utf-8", "replace")


def _px(keep: timedelta) -> int:
    return max(1, round(keep.total_seconds() * 1000))
