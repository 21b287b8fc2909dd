"""Choose the providers and models for a job's calls, in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aijobs.ai.provider import Route
from aijobs.definitions.definition import JobDefinition
from aijobs.errors import JobError


class ModelRouter:
    """Chooses by definition and credential mode. The gateway finds out which of the routes is available.

    `routes` are by name. `default` is the route of definitions without one. `user_routes` says, by credential mode,
    where calls on a user's own key go, whatever the definition's route is: a user's key is never used for a platform
    route, nor the platform's key for a user's.
    """

    def __init__(
        self,
        routes: Mapping[str, tuple[Route, ...]],
        default: str,
        user_routes: Mapping[str, tuple[Route, ...]] | None = None,
    ) -> None:
        self._routes = dict(routes)
        self._default = default
        self._user_routes = dict(user_routes or {})

    def knows(self, route: str | None, credential_mode: str) -> bool:
        """Return whether there is a route for this credential mode and definitions with this route."""
        routes, name = self._choice(route, credential_mode)
        return name in routes

    def routes(self, definition: JobDefinition, credential_mode: str) -> tuple[Route, ...]:
        """Return the routes of a definition, in order. `JobError(INTERNAL_CONFIG)` if none is configured."""
        routes, name = self._choice(definition.route, credential_mode)
        if name not in routes:
            raise JobError("INTERNAL_CONFIG", f"{definition.job_type}: no route {name!r} is configured")
        return routes[name]

    def may_ask(self, definition: JobDefinition, credential_mode: str, providers: Collection[str]) -> bool:
        """Return whether a call of the definition may go to one of `providers`."""
        routes, name = self._choice(definition.route, credential_mode)
        return definition.prompt is not None and any(route.provider in providers for route in routes.get(name, ()))

    def _choice(self, route: str | None, credential_mode: str) -> tuple[Mapping[str, tuple[Route, ...]], str]:
        if credential_mode != "platform_key":
            return self._user_routes, credential_mode
        return self._routes, self._default if route is None else route
