"""The port that every AI provider fills: one request in, one text answer out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aijobs.ai.prompts import Prompt
from aijobs.errors import JobError


class CancellationToken(Protocol):
    """Ends a call when its job is cancelled or its deadline has come."""

    def raise_if_cancelled(self) -> None:
        """Raise the error that ends the attempt, if there is one; return at once otherwise."""

    def remaining(self) -> float:
        """Seconds until the attempt's deadline, never below 0."""

    def progress(self, percent: int) -> None:
        """Report that the answer is complete to `percent` (0–100). Call it as often as you like; it is shown twice a
        second at most.
        """

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the attempt must stop, at once if it must already. Use it to abort a call."""

    def sleep(self, seconds: float) -> None:
        """Wait, or raise the error that ends the attempt as soon as there is one."""


class SealedKey(Protocol):
    """A user's own key, still encrypted."""

    @property
    def credential_id(self) -> str: ...

    def open(self) -> str:
        """Return the decrypted key, for one call; don't keep it. `JobError(CREDENTIAL_UNREADABLE)` if it can't be
        decrypted.
        """


@dataclass(frozen=True, slots=True)
class Route:
    """A provider's name and one of its models."""

    provider: str
    model: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to a provider.

    `prompt` is for a model; `input` is the snapshot's content, for a provider that works by rules; `output_schema` is
    the JSON Schema of the answer. The token has the time limit. `constrained` is false if the last answer was blank, as
    some providers answer under a constraint: then the prompt alone asks for JSON.
    """

    job_type: str
    route: Route
    prompt: Prompt = field(repr=False)
    input: Mapping[str, Any] = field(repr=False)
    output_schema: Mapping[str, Any] = field(repr=False)
    max_output_tokens: int = 8_000
    constrained: bool = True
    last_route: bool = False
    """No other route is left: the provider gets the rest of the attempt's time."""
    credential: SealedKey | None = field(default=None, repr=False)
    """The user's own key that pays, or None for the platform's."""
    terms: Any = None
    """What the provider learned about its server's limits; None at first."""


@dataclass(frozen=True, slots=True)
class GenerateAnswer:
    """The answer: the raw text, and its usage. `cached_tokens` are part of `prompt_tokens`; None if unknown.

    `estimated`: the provider counted no tokens, and the figures are ours. `finish_reason` is the provider's; `length`
    means cut off.
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
    """What is known of a call without an answer: its possible cost, and what the server said.

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
    """A call without a usable answer. `facts` go to its usage row."""

    def __init__(
        self, code: str, internal: str, facts: CallFacts = CallFacts(), *, silent: bool = False, **more: Any
    ) -> None:
        """`silent`: the time was over before the server had sent anything."""
        super().__init__(code, internal, **more)
        self.facts, self.silent = facts, silent


class LessWanted(CallFailed):
    """The server refuses part of the request (a `response_format`, so many tokens). `request` is the same one without
    it.
    """

    def __init__(self, internal: str, facts: CallFacts, request: GenerateRequest) -> None:
        super().__init__("INTERNAL_CONFIG", internal, facts)
        self.request = request


class Moderator(Protocol):
    """A provider's own moderation of texts, beside our rules."""

    @property
    def moderation_route(self) -> Route:
        """The route of a moderation, for the usage row."""

    def moderate(self, texts: Sequence[str], token: CancellationToken) -> frozenset[str]:
        """Return the categories that it finds in the texts, in OpenAI's names. Raises `JobError`."""


class AiProvider(Protocol):
    """A source of answers. `generate` blocks until the answer is complete."""

    @property
    def name(self) -> str:
        """The name that routes and usage rows use."""

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        """Return the answer. Raises `JobError` with a code of `CODES`, and the token's errors: `CallFailed` with the
        facts of the call, `LessWanted` if another call that asks for less may succeed.
        """
