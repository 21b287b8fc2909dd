"""A chat completion, whole or streamed, in the shapes that OpenAI and DeepSeek share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aijobs.ai.billing.tokens import estimate_tokens
from aijobs.testing.fakellm.exchange import Exchange
from aijobs.testing.fakellm.request import Request

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
CREATED = 1_767_225_600
"""The same time in each answer, so that equal requests have equal answers."""

Usage = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step(ABC):
    """How one call is answered. `name` is for the log."""

    name: str = "answer"

    @abstractmethod
    def play(self, exchange: Exchange) -> None:
        """Answer the call."""


@dataclass(frozen=True)
class Answer(Step):
    """A completion with status 200; without arguments a good one, made from the request's notes.

    `change` alters the content; `usage` replaces or alters the counts (None: none are sent); `finish_reason` None
    leaves it out; `no_message` sends null in its place. Streams have deltas of `delta_chars` characters with `delta_s`
    seconds before each (None: the server's value).
    """

    content: str | None = None
    change: Callable[[str], str] | None = None
    usage: Usage | Callable[[Usage], Usage] | Literal["counted"] | None = "counted"
    finish_reason: str | None = "stop"
    model: str | None = None
    reasoning: str = ""
    refusal: str = ""
    no_message: bool = False
    delta_chars: int = 40
    delta_s: float | None = None

    def play(self, exchange: Exchange) -> None:
        """Answer the call in one piece or as a stream, as requested."""
        if not exchange.request.stream:
            (body,) = self.pieces(exchange)
            exchange.body(200, JSON, body)
            return
        delta_s = exchange.delta_s if self.delta_s is None else self.delta_s
        exchange.head(200, EVENTS)
        for piece in self.pieces(exchange):
            if delta_s:
                exchange.wait(delta_s)
            exchange.write(piece)
        exchange.finish()

    def pieces(self, exchange: Exchange) -> list[bytes]:
        """Return the body: one piece, or the events of a stream. Its usage is recorded."""
        request = exchange.request
        content, finish_reason = self._complete(exchange)
        usage = self._usage(request, content)
        exchange.count(usage)
        frame = {
            "id": f"chatcmpl-{exchange.number}",
            "created": CREATED,
            "model": self.model or request.model,
            "system_fingerprint": "fp_fakellm",
        }
        if not request.stream:
            return [self._whole(frame, content, finish_reason, usage)]
        return [*self._events(frame, content, finish_reason, usage, request.include_usage)]

    def _complete(self, exchange: Exchange) -> tuple[str, str | None]:
        """Return the content and the finish reason. Content of our own keeps to the request's `max_tokens`."""
        content = exchange.write_content(exchange.request) if self.content is None else self.content
        content = self.change(content) if self.change else content
        most, needed = exchange.request.max_tokens, estimate_tokens(content)
        if self.content is None and most is not None and needed > most:
            return content[: len(content) * most // needed], "length"
        return content, self.finish_reason

    def _usage(self, request: Request, content: str) -> Usage | None:
        if self.usage is None or isinstance(self.usage, Mapping):
            return self.usage
        usage = counted(request, self.reasoning + content + self.refusal)
        return usage if self.usage == "counted" else self.usage(usage)

    def _whole(self, frame: dict[str, Any], content: str, finish_reason: str | None, usage: Usage | None) -> bytes:
        message: dict[str, Any] | None = {"role": "assistant", "content": content or (None if self.refusal else "")}
        if message is not None and self.reasoning:
            message["reasoning_content"] = self.reasoning
        if message is not None and self.refusal:
            message["refusal"] = self.refusal
        choice = {
            "index": 0,
            "message": None if self.no_message else message,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        answer = {**frame, "object": "chat.completion", "choices": [choice]}
        return encode(answer if usage is None else {**answer, "usage": dict(usage)})

    def _events(
        self, frame: dict[str, Any], content: str, finish_reason: str | None, usage: Usage | None, include_usage: bool
    ) -> Iterator[bytes]:
        empty = {"usage": None} if include_usage else {}
        for delta, reason in self._deltas(content, finish_reason):
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            yield event({**frame, "object": "chat.completion.chunk", "choices": [choice], **empty})
        if include_usage and usage is not None:
            yield event({**frame, "object": "chat.completion.chunk", "choices": [], "usage": dict(usage)})
        yield DONE

    def _deltas(self, content: str, finish_reason: str | None) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
        if self.no_message:
            yield None, finish_reason
            return
        yield {"role": "assistant", "content": ""}, None
        for name, text in (("reasoning_content", self.reasoning), ("refusal", self.refusal), ("content", content)):
            for start in range(0, len(text), self.delta_chars):
                yield {name: text[start : start + self.delta_chars]}, None
        if finish_reason is not None:
            yield {}, finish_reason


def counted(request: Request, answer: str) -> dict[str, Any]:
    """Return usage with the fields of OpenAI and DeepSeek."""
    prompt = estimate_tokens(request.text())
    completion = estimate_tokens(answer)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "prompt_cache_hit_tokens": 0,
        "prompt_cache_miss_tokens": prompt,
    }


def encode(value: Any) -> bytes:
    """Return JSON like providers send it, in raw UTF-8.

    A character of `\\udc80`–`\\udcff` becomes the byte that it stands for, to write invalid UTF-8; any other half of a
    surrogate pair becomes its escape.
    """
    try:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def event(value: Any) -> bytes:
    """Return one event of a stream."""
    return b"data: " + encode(value) + b"\n\n"
