"""Gateways to providers that tests bring, with breaker and slots in memory."""

from __future__ import annotations

from typing import Any

from aijobs.ai.calling.breaker import CircuitBreaker
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.provider import AiProvider
from aijobs.testing.memory_breaker_store import MemoryBreakerStore
from aijobs.testing.memory_call_slots import MemoryCallSlots


def health() -> dict[str, Any]:
    """What `build_services` takes in place of what it keeps in Redis."""
    return {"breaker_store": MemoryBreakerStore(), "call_slots": MemoryCallSlots()}


def gateway_to(*providers: AiProvider, limit: int = 0, breaker: CircuitBreaker | None = None) -> AiGateway:
    """The way to these providers, each treated as a server that may have `limit` calls at once."""
    breaker = breaker or CircuitBreaker(MemoryBreakerStore(), 5, 30.0)
    return AiGateway(providers, {provider.name: limit for provider in providers}, breaker, MemoryCallSlots())
