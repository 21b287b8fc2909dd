"""The port that every AI provider fills: one request in, one text answer out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from aijobs.ai.prompts import Prompt


class CancellationToken(Protocol):
    """What the engine hands down so that a call ends when its job is cancelled or its deadline has come."""

    @property
    def cancelled(self) -> bool:
        """True once the job was cancelled, its lease was lost or its deadline has passed."""

    def raise_if_cancelled(self) -> None:
        """Raise the error that ends the attempt, if there is one; return at once otherwise."""

    def remaining(self) -> float:
        """Seconds until the attempt's deadline, never below 0."""

    def progress(self, percent: int) -> None:
        """Say that the answer is there to `percent` (0–100): as often as you like, shown twice a second at most."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a call goes: a provider's name and one of its models."""

    provider: str
    model: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One piece of work for a provider.

    `prompt` is what a model reads; `input` is the snapshot's content, for a provider that works by rules;
    `output_schema` is the JSON Schema that the answer has to satisfy. How long it may take is the token's to
    say.
    """

    job_type: str
    route: Route
    prompt: Prompt = field(repr=False)
    input: Mapping[str, Any] = field(repr=False)
    output_schema: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class GenerateAnswer:
    """What came back: the raw text and what it took. `cached_tokens` are part of `prompt_tokens`.

    `estimated` says that the provider counted no tokens and the figures are ours. `finish_reason` is the
    provider's word; `length` means cut off.
    """

    text: str = field(repr=False)
    provider: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    estimated: bool
    finish_reason: str


class AiProvider(Protocol):
    """A source of answers. `generate` blocks until the answer is whole."""

    @property
    def name(self) -> str:
        """The name that routes and usage rows use."""

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        """The answer. Raises `JobError` with a code of `errors.py`, and whatever the token raises."""
