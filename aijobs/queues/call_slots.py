"""The slots of provider calls in Redis: one key for each."""

from __future__ import annotations

import random
from datetime import timedelta

from aijobs.ai.calling.slots import UNLIMITED
from aijobs.errors import BrokerUnavailable
from aijobs.ids import InstanceId, new_id
from aijobs.logs import Outage, get_logger
from aijobs.queues.shared_texts import SharedTexts
from aijobs.reading import warn_unreadable

logger = get_logger(__name__)


def slot_key(provider: str, number: int | str) -> str:
    """Return the key of one slot of a provider."""
    return f"aijobs:calls:{provider}:{number}"


class RedisCallSlots:
    """See `aijobs.ai.calling.slots.CallSlots`.

    A token is the slot's number and its holder: the process, and a name that no other call has. Slots of a dead process
    of this host are free at once, because its jobs start again at once.
    """

    def __init__(self, texts: SharedTexts, instance: InstanceId) -> None:
        self._texts, self._instance = texts, instance
        self._outage = Outage(logger, "calls.slots")

    def take(self, provider: str, limit: int, lease_s: float) -> str | None:
        """Read all slots, then try to take each free one, in random order."""
        if limit <= 0:
            return UNLIMITED
        holder, keep = f"{self._instance}/{new_id()}", timedelta(seconds=lease_s)
        try:
            free = [(n, text) for n, text in enumerate(self._read(provider, limit)) if self._is_free(text)]
            random.shuffle(free)
            for number, seen in free:
                if self._put(slot_key(provider, number), seen, holder, keep):
                    return f"{number}/{holder}"
        except BrokerUnavailable as error:
            self._outage.failed(error)
            return UNLIMITED
        return None

    def release(self, provider: str, token: str) -> None:
        """Delete the slot's key if the token still holds it."""
        if token == UNLIMITED:
            return
        number, _, holder = token.partition("/")
        try:
            self._texts.swap(slot_key(provider, number), holder, None, timedelta())
        except BrokerUnavailable as error:
            self._outage.failed(error)

    def in_use(self, provider: str, limit: int) -> int | None:
        """See `CallSlots.in_use`. Reads all slots in one round trip."""
        if limit <= 0:
            return None
        try:
            return sum(not self._is_free(text) for text in self._read(provider, limit))
        except BrokerUnavailable as error:
            self._outage.failed(error)
            return None

    def _is_free(self, text: str | None) -> bool:
        """Return whether nobody holds the slot, or a process that is known to be gone. This process's own pid is never
        judged.
        """
        if text is None:
            return True
        holder = InstanceId.parse(text)
        if holder is None:
            warn_unreadable("call slot")
            return True
        return holder.pid != self._instance.pid and holder.is_dead_beside(self._instance)

    def _put(self, key: str, seen: str | None, holder: str, keep: timedelta) -> bool:
        # A value of another type reads as none, and keeps `add` from working.
        return (seen is None and self._texts.add(key, holder, keep)) or self._texts.swap(key, seen, holder, keep)

    def _read(self, provider: str, limit: int) -> list[str | None]:
        texts = self._texts.read([slot_key(provider, number) for number in range(limit)])
        self._outage.worked()
        return texts
