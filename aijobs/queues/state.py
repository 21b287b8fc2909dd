"""How the broker is: whether it answers and takes messages, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OK, AWAY, TAKES_NO_WRITES, UNSUPPORTED = "ok", "away", "takes_no_writes", "unsupported"
BROKER_STATES = (OK, AWAY, TAKES_NO_WRITES, UNSUPPORTED)
REFUSED = "refused"
"""It refuses one key or command, and may well take others."""


@dataclass(frozen=True)
class QueueState:
    """One queue. `state` is one of `BROKER_STATES`; `cause` in English where it isn't ok."""

    state: str = OK
    cause: str | None = None
    depth: int | None = None
    """Messages that wait; None if the broker doesn't tell."""


@dataclass(frozen=True)
class BrokerState:
    """The broker and its job queues. If it refuses one queue alone, `state` is `takes_no_writes` and only that queue
    isn't ok."""

    state: str
    cause: str | None = None
    queues: Mapping[str, QueueState] = field(default_factory=dict)

    def of(self, queue_name: str) -> QueueState:
        """The queue's state; the broker's own for a queue that wasn't asked for."""
        return self.queues.get(queue_name, QueueState(self.state, self.cause))
