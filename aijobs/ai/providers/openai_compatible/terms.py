"""The limits of a server's requests, from its configuration and from its refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aijobs.ai.billing.tokens import estimate_tokens
from aijobs.ai.catalogue import JsonMode, ProviderConfig

_LESS: Mapping[JsonMode, JsonMode] = {"json_schema": "json_object", "json_object": "prompt"}
_CONSTRAINT = re.compile(r"response_?format|json_?schema|json_?object|guided_(?:json|decoding)|structured outputs?")
_OTHER_NAME = re.compile(r"max_completion_tokens")
_LIMIT_ON = re.compile(r"max_(?:completion_)?tokens")
_AT_MOST = re.compile(r"(?:at most|<=|less than or equal to|maximum(?: value)?(?: is| of)?|\[\d+, ?)\D{0,12}(\d{1,9})")
_CONTEXT = re.compile(r"(?:maximum (?:context|model) length|context (?:length|size|window)) (?:is|of)\D{0,12}(\d{1,9})")
_IN_PROMPT = re.compile(r"(\d{1,9}) (?:in the messages|in the prompt|input tokens)|prompt contains (\d{1,9})")
_MARGIN = 64
"""Tokens that servers add to a prompt."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a model's requests."""

    json_mode: JsonMode
    tokens_name: str
    """The field that limits the answer: `max_tokens`, or `max_completion_tokens` for newer OpenAI models."""
    most_tokens: int | None = None
    """Maximum tokens of an answer; None if unknown."""
    context_tokens: int | None = None
    """Maximum tokens of prompt and answer together; None if unknown."""
    this_time: int | None = None
    """Maximum tokens of the answer to this prompt, as its server counted."""

    @classmethod
    def of(cls, config: ProviderConfig) -> Terms:
        """Return the terms of a configuration, before anything was learned."""
        return cls(config.json_mode, config.tokens_name, config.max_output_tokens, config.context_tokens)

    @property
    def for_others(self) -> Terms:
        """Return the terms that hold for other requests too."""
        return replace(self, this_time=None)

    def room(self, wanted: int, prompt: str) -> int:
        """Return how many of the wanted tokens to ask for; at least 1."""
        left = self.this_time
        if left is None and self.context_tokens is not None:
            left = self.context_tokens - estimate_tokens(prompt) - _MARGIN
        return max(1, min(limit for limit in (wanted, self.most_tokens, left) if limit is not None))

    def after(self, refusal: str, asked_tokens: int) -> Terms | None:
        """Return the terms after a refusal (in lower case); None if it isn't about them, or if there is nothing less to
        ask for.
        """
        if self.tokens_name != "max_completion_tokens" and _OTHER_NAME.search(refusal):
            return replace(self, tokens_name="max_completion_tokens")
        if (context := _CONTEXT.search(refusal)) is not None:
            return self._within(int(context[1]), refusal, asked_tokens)
        if _LIMIT_ON.search(refusal):
            limit = _AT_MOST.search(refusal)
            return replace(self, most_tokens=int(limit[1])) if limit and 0 < int(limit[1]) < asked_tokens else None
        if self.json_mode in _LESS and _CONSTRAINT.search(refusal):
            return replace(self, json_mode=_LESS[self.json_mode])
        return None

    def _within(self, context: int, refusal: str, asked_tokens: int) -> Terms | None:
        """Return terms with fewer tokens for the answer, if the prompt alone fits; otherwise the notes are too long."""
        prompt = _IN_PROMPT.search(refusal)
        if prompt is None:
            return None
        left = context - int(prompt[1] or prompt[2]) - _MARGIN
        return replace(self, context_tokens=context, this_time=left) if 0 < left < asked_tokens else None
