"""The state of the broker: whether it answers and takes messages, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OK, AWAY, TAKES_NO_WRITES, UNSUPPORTED = "ok", "away", "takes_no_writes", "unsupported"
BROKER_STATES = (OK, AWAY, TAKES_NO_WRITES, UNSUPPORTED)
REFUSED = "refused"
"""The broker refuses one key or command, and may take others."""


@dataclass(frozen=True)
class QueueState:
    """The state of one queue: one of `BROKER_STATES`. `cause` is in English if it isn't ok."""

    state: str = OK
    cause: str | None = None
    depth: int | None = None
    """Number of waiting messages; None if the broker doesn't say."""


@dataclass(frozen=True)
class BrokerState:
    """The state of the broker and its job queues. If it refuses one queue alone, `state` is `takes_no_writes`, and only
    that queue isn't ok.
    """

    state: str
    cause: str | None = None
    queues: Mapping[str, QueueState] = field(default_factory=dict)

    def of(self, queue_name: str) -> QueueState:
        """Return a queue's state; the broker's for a queue that wasn't asked for."""
        return self.queues.get(queue_name, QueueState(self.state, self.cause))
