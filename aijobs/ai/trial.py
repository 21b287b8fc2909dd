"""Make a trial call to each provider and model, so that the operator finds faults before a learner's job does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aijobs.ai.billing.cost import Cost, CostCalculator
from aijobs.ai.catalogue import Catalogue, ProviderConfig
from aijobs.ai.output import parse_json_answer
from aijobs.ai.prompts import Prompt
from aijobs.ai.provider import AiProvider, CancellationToken, GenerateAnswer, GenerateRequest, LessWanted, Route
from aijobs.clock import Stopwatch, utc_now
from aijobs.errors import JobError

SECONDS = 60.0
"""Time limit of a trial call in seconds."""
_WORD = "pong"
_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string"}},
    "required": ["word"],
    "additionalProperties": False,
}
_PROMPT = Prompt(
    system="You answer with one JSON object and nothing else.",
    user=f'Answer in json, exactly: {{"word": "{_WORD}"}}',
)


@dataclass(frozen=True)
class Trial:
    """The result of a trial. `code` and `why` say what went wrong; `cost` is None if the model has no price."""

    provider: str
    model: str
    works: bool
    calls: int
    latency_ms: int
    code: str | None = None
    why: str | None = None
    tokens: int | None = None
    cost: Cost | None = None
    answered_as: str | None = None
    """The provider's name of the model, if it differs."""


def try_all(
    catalogue: Catalogue,
    providers: Iterable[AiProvider],
    costs: CostCalculator,
    new_token: Callable[[float], CancellationToken],
    *,
    all_models: bool = False,
) -> Iterator[Trial]:
    """Yield a trial of each server that the platform can call, in the catalogue's order: of its models that a route
    names (otherwise its first), or of all.
    """
    by_name = {provider.name: provider for provider in providers}
    for name, config in catalogue.providers.items():
        if config.ready:
            for model in config.models if all_models else _in_use(catalogue, config):
                yield _try(by_name[name], Route(name, model), costs, new_token(SECONDS))


def _in_use(catalogue: Catalogue, config: ProviderConfig) -> Sequence[str]:
    routed = {route for steps in (*catalogue.routes.values(), *catalogue.user_routes.values()) for route in steps}
    return [model for model in config.models if Route(config.name, model) in routed] or config.models[:1]


def _try(provider: AiProvider, route: Route, costs: CostCalculator, token: CancellationToken) -> Trial:
    request = GenerateRequest("trial", route, _PROMPT, {}, _SCHEMA, max_output_tokens=1_000)
    watch, calls = Stopwatch(), 0
    while True:
        calls += 1
        try:
            answer = provider.generate(request, token)
            _check(answer)
        except LessWanted as wanted:
            request = wanted.request
            continue
        except JobError as error:
            why = error.internal
            return Trial(route.provider, route.model, False, calls, watch.ms, code=error.code, why=why)
        return _worked(answer, route, costs, calls, watch.ms)


def _check(answer: GenerateAnswer) -> None:
    if answer.finish_reason == "length":
        raise JobError("VALIDATION_TRUNCATED", "the answer was cut off")
    parse_json_answer(answer.text)


def _worked(answer: GenerateAnswer, route: Route, costs: CostCalculator, calls: int, latency_ms: int) -> Trial:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    cost = tokens = None
    if prompt is not None and completion is not None:
        tokens = prompt + completion
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": 0}
        cost = costs.cost(answer.provider, answer.model, **counts, at=utc_now())
    return Trial(
        route.provider,
        route.model,
        True,
        calls,
        latency_ms,
        tokens=tokens,
        cost=cost,
        answered_as=answer.model if answer.model != route.model else None,
    )
