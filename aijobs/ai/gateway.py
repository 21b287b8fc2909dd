"""The one way from the engine to a provider."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aijobs.ai.output import EmptyAnswer
from aijobs.ai.provider import AiProvider, CancellationToken, GenerateAnswer, GenerateRequest, Route
from aijobs.errors import JobError


class AiGateway:
    """Hands a request to the provider of its route, and refuses answers that no parser should see."""

    def __init__(self, providers: Iterable[AiProvider]) -> None:
        self._providers = {provider.name: provider for provider in providers}

    def generate(
        self,
        request: GenerateRequest,
        token: CancellationToken,
        on_call: Callable[[Route], None] | None = None,
    ) -> GenerateAnswer:
        """The provider's answer to `request`.

        `on_call` is called before each request that leaves for a provider, with where it goes: the place to open
        the call's usage row. Raises `JobError`: INTERNAL_CONFIG for a route to no provider; VALIDATION_TRUNCATED for
        an answer that was cut off, even one that would parse; PROVIDER_EMPTY_OUTPUT for a blank one; the provider's
        own; and whatever the token raises.
        """
        provider = self._providers.get(request.route.provider)
        if provider is None:
            raise JobError("INTERNAL_CONFIG", f"no provider {request.route.provider!r} is configured")
        token.raise_if_cancelled()
        if on_call is not None:
            on_call(request.route)
        answer = provider.generate(request, token)
        token.raise_if_cancelled()
        return answer


def refuse_unusable(answer: GenerateAnswer) -> None:
    """Raise for an answer whose content must not be read: cut off, or blank."""
    if answer.finish_reason == "length":
        fault = "the answer was cut off at the token limit: give fewer or shorter items"
        raise JobError("VALIDATION_TRUNCATED", fault, faults=(fault,))
    if not answer.text.strip():
        raise EmptyAnswer
