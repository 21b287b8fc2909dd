"""Limit the concurrent calls of a provider across all processes."""

from __future__ import annotations

from typing import Protocol

UNLIMITED = "unlimited"
"""The token of a call without a slot: there is no limit, or the store is away."""


class CallSlots(Protocol):
    """A number of slots for each provider. A slot is a lease: if its worker died, it is free when the lease ends."""

    def take(self, provider: str, limit: int, lease_s: float) -> str | None:
        """Return a token for one of `limit` slots (0: no limit), held for `lease_s` seconds at most; None if all are
        taken.

        `UNLIMITED` while the store is away: too many calls are better than none.
        """
        ...

    def release(self, provider: str, token: str) -> None:
        """Free the slot of `token`, if its lease isn't over. Never raises."""
        ...

    def in_use(self, provider: str, limit: int) -> int | None:
        """Return the number of taken slots; None while the store is away, and without a limit."""
        ...
