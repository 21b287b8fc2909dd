"""Estimate the maximum cost of a job's next provider call. A quota reserves it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from aijobs.ai.billing.cost import CostCalculator
from aijobs.ai.billing.tokens import estimate_tokens
from aijobs.ai.provider import Route
from aijobs.definitions.definition import PLATFORM_KEY, JobDefinition

INSTRUCTIONS = 1500
"""Tokens of a prompt beside the input: rules and output schema."""
LOOK_AHEAD = timedelta(hours=1)
"""A job may start this long after its creation: a price that rises by then counts already."""


@dataclass(frozen=True)
class Forecast:
    """Tokens of prompt and answer together, and millionths of the price list's currency."""

    tokens: int = 0
    cost_micros: int = 0


NOTHING = Forecast()


class Forecaster:
    """Estimates the prompt, and assumes the longest answer that the definition allows."""

    def __init__(self, routes: Callable[[JobDefinition, str], Sequence[Route]], costs: CostCalculator) -> None:
        """`routes(definition, credential mode)`: where the call may go. The most expensive route counts."""
        self._routes, self._costs = routes, costs

    def call(
        self, definition: JobDefinition, credential_mode: str, content: Mapping[str, Any], at: datetime
    ) -> Forecast:
        """Return the forecast for one call with this input, at `at` or an hour later, whichever is more expensive.

        Nothing for a type that calls no provider, and for a call on a user's own key. A model without a price counts as
        free.
        """
        if definition.prompt is None or credential_mode != PLATFORM_KEY:
            return NOTHING
        prompt = INSTRUCTIONS + estimate_tokens(json.dumps(content, ensure_ascii=False))
        answer = definition.max_output_tokens
        costs = (
            self._costs.cost(
                route.provider, route.model, prompt_tokens=prompt, completion_tokens=answer, cached_tokens=0, at=when
            )
            for when in (at, at + LOOK_AHEAD)
            for route in self._routes(definition, credential_mode)
        )
        return Forecast(prompt + answer, max((cost.micro_units for cost in costs if cost is not None), default=0))
