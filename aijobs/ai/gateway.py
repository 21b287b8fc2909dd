"""The one way from the engine to a provider."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aijobs.ai.provider import AiProvider, CancellationToken, GenerateAnswer, GenerateRequest, Route
from aijobs.errors import JobError


class AiGateway:
    """Hands a request to the provider of its route. Reading the answer is `ai.output`'s part."""

    def __init__(self, providers: Iterable[AiProvider]) -> None:
        self._providers = {provider.name: provider for provider in providers}

    def generate(
        self,
        request: GenerateRequest,
        token: CancellationToken,
        on_call: Callable[[Route], None] | None = None,
    ) -> GenerateAnswer:
        """The provider's answer to `request`.

        `on_call` is called before each request that leaves for a provider, with where it goes: the place to
        open the call's usage row. An answer that can't be used comes back like any other, so that what it
        cost is known. Raises `JobError`: INTERNAL_CONFIG for a route to no provider, the provider's own, and
        what the token raises.
        """
        provider = self._providers.get(request.route.provider)
        if provider is None:
            raise JobError("INTERNAL_CONFIG", f"no provider {request.route.provider!r} is configured")
        token.raise_if_cancelled()
        if on_call is not None:
            on_call(request.route)
        return provider.generate(request, token)
