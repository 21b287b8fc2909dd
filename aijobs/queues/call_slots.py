"""The slots of provider calls in Redis: a key for each, held by whoever could add it."""

from __future__ import annotations

import random
from datetime import timedelta

from aijobs.ai.slots import UNLIMITED
from aijobs.errors import BrokerUnavailable
from aijobs.ids import new_id
from aijobs.logs import Outage, get_logger
from aijobs.queues.shared_texts import SharedTexts

logger = get_logger(__name__)


def slot_key(provider: str, number: int | str) -> str:
    """The key of one slot of a provider."""
    return f"aijobs:calls:{provider}:{number}"


class RedisCallSlots:
    """See `aijobs.ai.slots.CallSlots`. A token is the slot's number and a name that nobody else has."""

    def __init__(self, texts: SharedTexts) -> None:
        self._texts = texts
        self._outage = Outage(logger, "calls.slots")

    def take(self, provider: str, limit: int, lease_s: float) -> str | None:
        """One look at all slots, then a try for each that was free, in any order."""
        if limit <= 0:
            return UNLIMITED
        holder, keep = new_id(), timedelta(seconds=lease_s)
        try:
            free = [number for number, text in enumerate(self._read(provider, limit)) if text is None]
            random.shuffle(free)
            for number in free:
                if self._texts.add(slot_key(provider, number), holder, keep):
                    return f"{number}/{holder}"
        except BrokerUnavailable as error:
            self._outage.failed(error)
            return UNLIMITED
        return None

    def give_back(self, provider: str, token: str) -> None:
        """Take the slot's key away where it is still ours."""
        if token == UNLIMITED:
            return
        number, _, holder = token.partition("/")
        try:
            self._texts.swap(slot_key(provider, number), holder, None, timedelta())
        except BrokerUnavailable as error:
            self._outage.failed(error)

    def in_use(self, provider: str, limit: int) -> int | None:
        """One look at all slots."""
        if limit <= 0:
            return None
        try:
            return sum(text is not None for text in self._read(provider, limit))
        except BrokerUnavailable as error:
            self._outage.failed(error)
            return None

    def _read(self, provider: str, limit: int) -> list[str | None]:
        texts = self._texts.read([slot_key(provider, number) for number in range(limit)])
        self._outage.worked()
        return texts
