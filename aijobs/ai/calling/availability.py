"""Return whether any provider route is available for a new job or a retry."""

from __future__ import annotations

from datetime import timedelta

from aijobs.ai.calling.breaker import CircuitBreaker, scope_of
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.catalogue import LOCAL
from aijobs.definitions.definition import JobDefinition
from aijobs.errors import JobError


class Availability:
    """Reads the breakers of a definition's routes. It takes no probe."""

    def __init__(self, router: ModelRouter, breaker: CircuitBreaker) -> None:
        self._router, self._breaker = router, breaker

    def unavailable_for(
        self, definition: JobDefinition, credential_mode: str, credential_id: str | None
    ) -> timedelta | None:
        """Return how long until a call is worth trying, if every route has an open breaker; otherwise None.

        None too if no route is configured: that is no outage, and the job's own error says it.
        """
        if definition.prompt is None:
            return None
        try:
            routes = self._router.routes(definition, credential_mode)
        except JobError:
            return None
        waits = []
        for provider in dict.fromkeys(route.provider for route in routes):
            wait = None if provider == LOCAL.provider else self._breaker.blocked_for(scope_of(provider, credential_id))
            if wait is None:
                return None
            waits.append(wait)
        return min(waits, default=None)
