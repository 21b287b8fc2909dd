"""Short texts in Redis that all processes see alike and change as one step: what breakers and call slots are made of.

Nothing of a job depends on them, so nobody waits long for them: after an error none is asked for during some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import redis

from aijobs.errors import BrokerUnavailable
from aijobs.queues.connection import connect, unavailable
from aijobs.settings import Settings

T = TypeVar("T")

TIMEOUT_S = 0.5
PAUSE_S = 3.0
"""After an error, for so long nothing is asked: each call of a provider would wait for the frozen Redis again."""


class SharedTexts:
    """Texts by key, each with an end. Every method raises `BrokerUnavailable`."""

    def __init__(self, client: redis.Redis, *, pause_s: float = PAUSE_S) -> None:
        self._client, self._pause_s = client, pause_s
        self._again_at = 0.0

    @classmethod
    def from_settings(cls, settings: Settings) -> SharedTexts:
        """Those of the broker that the settings name; nothing is connected yet. `SettingsError`."""
        return cls(connect(settings.broker_url(), timeout_s=TIMEOUT_S))

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """The text of each key."""
        return [_text(value) for value in self._run(lambda: self._client.mget(keys))]

    def read_with_time(self, keys: Sequence[str]) -> tuple[int, list[str | None]]:
        """Redis's own time in milliseconds, and the text of each key."""

        def ask() -> tuple[int, list[str | None]]:
            pipeline = self._client.pipeline(transaction=False)
            pipeline.time()
            pipeline.mget(keys)
            (seconds, micros), values = pipeline.execute()
            return seconds * 1000 + micros // 1000, [_text(value) for value in values]

        return self._run(ask)

    def add(self, key: str, text: str, keep: timedelta) -> bool:
        """Write a text where there is none; whether there was none."""
        return bool(self._run(lambda: self._client.set(key, text, nx=True, px=_px(keep))))

    def swap(self, key: str, seen: str | None, new: str | None, keep: timedelta) -> bool:
        """Write `new` (None: take the text away) where it is still `seen`; whether it was."""

        def exchange() -> bool:
            with self._client.pipeline() as pipeline:
                pipeline.watch(key)
                if _text(pipeline.get(key)) != seen:
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

        return self._run(exchange)

    def _run(self, ask: Callable[[], T]) -> T:
        if time.monotonic() < self._again_at:
            raise BrokerUnavailable("broker: not asked, as it failed a moment ago")
        try:
            return ask()
        except redis.RedisError as error:
            self._again_at = time.monotonic() + self._pause_s
            raise unavailable(self._client, error) from error


def _text(value: Any) -> str | None:
    return None if value is None else bytes(value).decode("utf-8", "replace")


def _px(keep: timedelta) -> int:
    return max(1, round(keep.total_seconds() * 1000))
