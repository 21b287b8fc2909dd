"""The port that every AI provider fills: one request in, one text answer out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aijobs.ai.prompts import Prompt
from aijobs.errors import JobError


class CancellationToken(Protocol):
    """What the engine hands down so that a call ends when its job is cancelled or its deadline has come."""

    def raise_if_cancelled(self) -> None:
        """Raise the error that ends the attempt, if there is one; return at once otherwise."""

    def remaining(self) -> float:
        """Seconds until the attempt's deadline, never below 0."""

    def progress(self, percent: int) -> None:
        """Say that the answer is there to `percent` (0–100): as often as you like, shown twice a second at most."""

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the attempt must stop, at once where it must already: the place to abort a call."""

    def sleep(self, seconds: float) -> None:
        """Wait, or raise the error that ends the attempt as soon as there is one."""


class SealedKey(Protocol):
    """A user's own key, still encrypted."""

    @property
    def credential_id(self) -> str: ...

    def open(self) -> str:
        """The key in plain, for one call; nobody keeps it. `JobError(CREDENTIAL_UNREADABLE)` where it does not open."""


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
    say. `constrained` is off where the last answer was blank, as some providers answer under a constraint: then the
    prompt alone asks for JSON.
    """

    job_type: str
    route: Route
    prompt: Prompt = field(repr=False)
    input: Mapping[str, Any] = field(repr=False)
    output_schema: Mapping[str, Any] = field(repr=False)
    max_output_tokens: int = 8_000
    constrained: bool = True
    last_route: bool = False
    """No other route is left to ask: the provider gets the rest of the attempt's time."""
    credential: SealedKey | None = field(default=None, repr=False)
    """The user's own key that pays, or None for the platform's."""
    terms: Any = None
    """What the provider found out that its server takes; its own, and None at first."""


@dataclass(frozen=True, slots=True)
class GenerateAnswer:
    """What came back: the raw text and what it took. `cached_tokens` are part of `prompt_tokens`; None: not known.

    `estimated` says that the provider counted no tokens and the figures are ours. `finish_reason` is the
    provider's word; `length` means cut off.
    """

    text: str = field(repr=False)
    provider: str
    model: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    estimated: bool
    finish_reason: str
    http_status: int | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of a call that gave no answer: what it may have cost, and what the server said.

    `billed` is yes, no or unknown.
    """

    billed: str = "unknown"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    estimated: bool = False
    finish_reason: str | None = None
    http_status: int | None = None
    request_id: str | None = None


class CallFailed(JobError):
    """A call that gave no answer to use; `facts` go to its usage row."""

    def __init__(
        self, code: str, internal: str, facts: CallFacts = CallFacts(), *, silent: bool = False, **more: Any
    ) -> None:
        """`silent`: the attempt's time was over before the server had said anything."""
        super().__init__(code, internal, **more)
        self.facts, self.silent = facts, silent


class LessWanted(CallFailed):
    """The server doesn't take something of how it was asked (a `response_format`, so many tokens); `request` is the
    same one without it.
    """

    def __init__(self, internal: str, facts: CallFacts, request: GenerateRequest) -> None:
        super().__init__("INTERNAL_CONFIG", internal, facts)
        self.request = request


class Moderator(Protocol):
    """A provider's own judgement of texts, beside our rules."""

    @property
    def moderation_route(self) -> Route:
        """Where it asks, for the usage row."""

    def moderate(self, texts: Sequence[str], token: CancellationToken) -> frozenset[str]:
        """The categories that it finds in the texts, as OpenAI names them. Raises `JobError`."""


class AiProvider(Protocol):
    """A source of answers. `generate` blocks until the answer is whole."""

    @property
    def name(self) -> str:
        """The name that routes and usage rows use."""

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        """The answer. Raises `JobError` with a code of `errors.py`, and whatever the token raises: `CallFailed` with
        what is known of the call, `LessWanted` where another call that asks for less may succeed.
        """
