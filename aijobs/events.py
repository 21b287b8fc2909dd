"""The in-process event bus: subscribers are called after the commit, in the same thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aijobs.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class DomainEvent:
    """A committed event. `type` is an outbox event type; `payload` holds only ids and words."""

    type: str
    job_id: str
    payload: Mapping[str, Any]


Subscriber = Callable[[DomainEvent], None]


class EventBus:
    """Synchronous publish and subscribe. A subscriber's error is logged, and the others are called."""

    def __init__(self) -> None:
        self._subscribers: dict[str, list[Subscriber]] = defaultdict(list)

    def subscribe(self, event_type: str, subscriber: Subscriber) -> None:
        """Call `subscriber` for each event of this type."""
        self._subscribers[event_type].append(subscriber)

    def publish(self, event: DomainEvent) -> None:
        """Call every subscriber of the event's type."""
        for subscriber in self._subscribers[event.type]:
            try:
                subscriber(event)
            except Exception as error:
                logger.error("event.subscriber_failed", eventType=event.type, error=type(error).__name__)
