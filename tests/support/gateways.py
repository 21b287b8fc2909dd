"""Gateways to the providers of a test, with breaker and call slots in memory."""

from __future__ import annotations

from typing import Any

from aijobs.ai.calling.breaker import CircuitBreaker
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.provider import AiProvider
from aijobs.testing.memory_breaker_store import MemoryBreakerStore
from aijobs.testing.memory_call_slots import MemoryCallSlots


def health() -> dict[str, Any]:
    """Return arguments for `build_services`: breaker and call slots in memory instead of Redis."""
    return {"breaker_store": MemoryBreakerStore(), "call_slots": MemoryCallSlots()}


def gateway_to(*providers: AiProvider, limit: int = 0, breaker: CircuitBreaker | None = None) -> AiGateway:
    """Return a gateway to these providers with at most `limit` calls at once for each; 0 means no limit."""
    breaker = breaker or CircuitBreaker(MemoryBreakerStore(), 5, 30.0)
    return AiGateway(providers, {provider.name: limit for provider in providers}, breaker, MemoryCallSlots())
