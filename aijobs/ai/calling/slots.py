"""How many calls of one provider go on at once, in all processes together."""

from __future__ import annotations

from typing import Protocol

UNLIMITED = "unlimited"
"""The token of a call that takes no slot: there is no limit, or nobody can count."""


class CallSlots(Protocol):
    """A number of slots for each provider. A slot is a lease: that of a worker which died comes back when it ends,
    at the latest."""

    def take(self, provider: str, limit: int, lease_s: float) -> str | None:
        """A token for one of `limit` slots (0: any number), held for `lease_s` seconds at most; None: all are taken.

        `UNLIMITED` while nobody can count: then better too many calls than none.
        """
        ...

    def release(self, provider: str, token: str) -> None:
        """Free the slot of `token`; nothing happens where its lease is over. Never raises."""
        ...

    def in_use(self, provider: str, limit: int) -> int | None:
        """How many of the slots are taken; None while nobody can count, and without a limit."""
        ...
