"""Whether anybody would work on a job that is made now: asked before it is made, and before it is retried."""

from __future__ import annotations

from datetime import timedelta

from aijobs.ai.calling.breaker import CircuitBreaker, scope_of
from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.catalogue import LOCAL
from aijobs.definitions.definition import JobDefinition
from aijobs.errors import JobError


class Availability:
    """What the breakers say of the routes of a definition. It only looks: no probe is taken."""

    def __init__(self, router: ModelRouter, breaker: CircuitBreaker) -> None:
        self._router, self._breaker = router, breaker

    def unavailable_for(
        self, definition: JobDefinition, credential_mode: str, credential_id: str | None
    ) -> timedelta | None:
        """How long until it is worth asking again, where every route has an open breaker; None where one has not.

        None too where no route is configured: that is no outage, and the job's own error says it.
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
