"""One request and its stream: what has arrived, its time limits, and its facts if it broke off."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aijobs.ai.billing.tokens import estimate_tokens, read_count
from aijobs.ai.output import MAX_CHARACTERS
from aijobs.ai.provider import CallFacts, CallFailed, GenerateAnswer, GenerateRequest
from aijobs.ai.providers.openai_compatible.names import name, reason

BLANK_LIMIT = 4_000
"""White space in a row after which the model counts as runaway, as some do under a grammar."""


@dataclass
class Limits:
    """Time limits of one call in seconds. A keep-alive is no progress: only data with content counts."""

    first_data_s: float
    idle_s: float
    deadline_s: float
    """Seconds until the attempt's deadline, the upper limit."""

    @classmethod
    def until_deadline(cls, seconds: float) -> Limits:
        """Return limits that end a call at the attempt's deadline and not before."""
        return cls(math.inf, math.inf, seconds)


@dataclass
class Wire:
    """How far one request got. Read from another thread when the call was cut off."""

    reached: bool = False
    """A connection to the server was started."""
    sent: bool = False
    """The request began to leave. Before that the call costs nothing."""

    def step(self, name: str) -> None:
        """Record a step of the HTTP client, for example `connection.connect_tcp.started`."""
        self.reached = True
        self.sent = self.sent or name.endswith("send_request_headers.started")

    @property
    def facts(self) -> CallFacts:
        """Return the facts of a call without any answer."""
        return CallFacts(billed="unknown" if self.sent else "no")


@dataclass
class Received:
    """The part of an answer that has arrived. Read from another thread when the call was cut off."""

    request: GenerateRequest = field(repr=False)
    key: str = field(default="", repr=False)
    """The call's key. A name from the server that contains part of it isn't used."""
    pieces: list[str] = field(default_factory=list, repr=False)
    characters: int = 0
    blanks: int = 0
    thought: int = 0
    """Characters of reasoning, which are billed and not kept."""
    refused: bool = False
    finish_reason: str | None = None
    model: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    request_id: str | None = None
    status: int | None = None
    wire: Wire = field(default_factory=Wire)
    told_at: float = field(default_factory=time.monotonic)
    """Time of the last data with content; at first the start of the call."""

    def is_silent(self, idle_s: float) -> bool:
        """Return whether the server has sent nothing at all, or nothing for `idle_s` seconds."""
        return self.wire.reached and (not self.said_anything or time.monotonic() - self.told_at >= idle_s)

    @property
    def said_anything(self) -> bool:
        """Whether any data with content has arrived."""
        return bool(self.characters or self.thought or self.finish_reason or self.usage)

    @property
    def text(self) -> str:
        joined = "".join(self.pieces)
        # A character outside the basic plane may arrive as two escapes in two deltas.
        return joined.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    @property
    def share(self) -> int:
        """Return the estimated progress in percent: half after 3,000 characters, never 100."""
        come = self.characters + self.thought
        return min(95, 100 * come // (come + 3_000))

    def add(self, chunk: Mapping[str, Any]) -> bool:
        """Add a chunk and return whether it had content. `CallFailed` if the answer grows without end."""
        usage, choices = chunk.get("usage"), chunk.get("choices") or ()
        if isinstance(usage, Mapping):
            self.usage = usage
        if (model := name(chunk.get("model"), self.key)) is not None:
            self.model = model
        told = (self._add_choice(choices[0]) if choices else False) or bool(usage)
        if told:
            self.told_at = time.monotonic()
        return told

    def _add_choice(self, choice: Mapping[str, Any]) -> bool:
        said = choice.get("delta") or choice.get("message") or {}
        text, thought = said.get("content"), said.get("reasoning_content") or said.get("reasoning")
        if isinstance(thought, str):
            self.thought += len(thought)
        if isinstance(text, str):
            self._add_text(text)
        if said.get("refusal"):
            self.refused = True
        if isinstance(ended := choice.get("finish_reason"), str):
            self.finish_reason = reason(ended)
        return bool(text or thought or said.get("refusal") or ended)

    def _add_text(self, text: str) -> None:
        self.pieces.append(text)
        self.characters += len(text)
        kept = text.rstrip()
        self.blanks = len(text) - len(kept) + (0 if kept else self.blanks)
        if self.characters > MAX_CHARACTERS:
            long = f"the answer passed {MAX_CHARACTERS} characters"
            raise CallFailed("VALIDATION_OUTPUT_TOO_LARGE", long, self.facts())
        if self.blanks > BLANK_LIMIT:
            if self.blanks == self.characters:
                raise CallFailed("PROVIDER_EMPTY_OUTPUT", "nothing but white space came", self.facts())
            raise CallFailed("PROVIDER_STREAM_BROKEN", "the answer ran away into white space", self.facts())

    def answer(self, provider: str) -> GenerateAnswer:
        """Return the complete answer. `CallFailed` if the model refused, or if the stream ended without a finish
        reason.
        """
        if self.refused or self.finish_reason == "content_filter":
            raise CallFailed("CONTENT_SAFETY_PROVIDER", "the provider declined", self.facts("yes"))
        if self.finish_reason is None:
            raise CallFailed("PROVIDER_STREAM_BROKEN", "the stream ended without a finish_reason", self.facts())
        if self.finish_reason == "insufficient_system_resource":
            raise CallFailed("PROVIDER_UNAVAILABLE", "cut off: insufficient_system_resource", self.facts())
        prompt, completion, cached, estimated = self._counts()
        return GenerateAnswer(
            text=self.text,
            provider=provider,
            model=self.model or self.request.route.model,
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=cached,
            estimated=estimated,
            finish_reason=self.finish_reason,
            http_status=self.status,
            request_id=self.request_id,
        )

    def facts(self, billed: str = "unknown") -> CallFacts:
        """Return the facts of a call without an answer. Counts are estimated if the provider sent none."""
        if not self.wire.sent:
            return self.wire.facts
        prompt, completion, cached, estimated = self._counts()
        return CallFacts(
            billed=billed,
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=cached,
            estimated=estimated,
            finish_reason=self.finish_reason,
            http_status=self.status,
            request_id=self.request_id,
        )

    def _counts(self) -> tuple[int | None, int | None, int | None, bool]:
        """Return prompt, completion and cached tokens, and whether they are our estimate: only if the provider sent
        none.

        An impossible count is None. Cached tokens are part of the prompt's; DeepSeek sends hits and misses, others the
        sum.
        """
        prompt, completion = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        hit, miss = self.usage.get("prompt_cache_hit_tokens"), read_count(self.usage.get("prompt_cache_miss_tokens"))
        details = self.usage.get("prompt_tokens_details")
        if hit is None and isinstance(details, Mapping):
            hit = details.get("cached_tokens")
        cached = 0 if hit is None else read_count(hit)
        if prompt is None and hit is not None and cached is not None and miss is not None:
            prompt = cached + miss
        if prompt is not None and completion is not None:
            return read_count(prompt), read_count(completion), cached, False
        asked = estimate_tokens(self.request.prompt.system) + estimate_tokens(self.request.prompt.user)
        return asked, estimate_tokens(self.text) + self.thought // 3, 0, True


async def receive(
    chunks: Callable[[], Awaitable[AsyncGenerator[Mapping[str, Any]]]], received: Received, limits: Limits
) -> None:
    """Open a stream and read it to its end, within the limits.

    `chunks()` opens it. Raises `TimeoutError` at the deadline, and before it `CallFailed` PROVIDER_TIMEOUT if nothing
    arrived within the limit, PROVIDER_STREAM_BROKEN if the stream stalled.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.deadline_s
    told = False
    try:
        async with asyncio.timeout_at(min(deadline, loop.time() + limits.first_data_s)) as limit:
            async with aclosing(await chunks()) as stream:
                async for chunk in stream:
                    if received.add(chunk):
                        told = True
                        limit.reschedule(min(deadline, loop.time() + limits.idle_s))
    except TimeoutError:
        if limit.when() == deadline:
            raise
        if told:
            raise CallFailed("PROVIDER_STREAM_BROKEN", f"no data for {limits.idle_s:g} s", received.facts()) from None
        raise CallFailed("PROVIDER_TIMEOUT", f"no data within {limits.first_data_s:g} s", received.facts()) from None
