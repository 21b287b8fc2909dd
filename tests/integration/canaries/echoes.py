"""Provider answers that repeat the request's key and notes in each place where a server may write text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aijobs.testing.fakellm import Answer, Reply, Step
from aijobs.testing.fakellm.answer import CREATED, DONE, EVENTS, JSON, event
from aijobs.testing.fakellm.exchange import Exchange
from aijobs.testing.fakellm.request import Request
from aijobs.testing.fakellm.steps import HTML
from tests.integration.canaries.canaries import NOTES

Make = Callable[[str], Any]


def echo(request: Request) -> str:
    """Return the repeated text: the key, the mark of the notes, and a part of the notes."""
    return f"{request.key} {NOTES} osmosis is the movement"


def _everywhere(text: str) -> dict[str, Any]:
    error = {"message": text, "type": text, "code": text, "param": text, text: text, "detail": [text, {text: text}]}
    return {"error": error, "message": text, "detail": text, text: text}


@dataclass(frozen=True)
class EchoReply(Step):
    """A response whose headers and body contain the repeated text. `body` builds the body."""

    status: int
    body: Make = _everywhere
    content_type: str = JSON
    name: str = field(default="echo-reply", kw_only=True)

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        text = echo(exchange.request)
        headers = dict.fromkeys(("X-Request-Id", "Location", "Retry-After", "WWW-Authenticate", "X-Should-Retry"), text)
        made = self.body(text)
        body: Any = made if isinstance(made, str) else dict(made)
        Reply(self.status, body, self.content_type, headers).play(exchange)


@dataclass(frozen=True)
class EchoStream(Step):
    """A stream of events that contain the repeated text, as does the request id."""

    events: Callable[[str], list[Any]]
    name: str = field(default="echo-stream", kw_only=True)

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        text = echo(exchange.request)
        exchange.head(200, EVENTS, headers={"X-Request-Id": text})
        for each in self.events(text):
            exchange.write(event({"id": "c", "object": "chat.completion.chunk", "created": CREATED, **each}))
        exchange.write(DONE)
        exchange.finish()


@dataclass(frozen=True)
class EchoAnswer(Step):
    """A good answer that `change` mixes with the repeated text."""

    change: Callable[[Mapping[str, Any], str], Any]
    fields: Callable[[str], Mapping[str, Any]] = lambda text: {}
    name: str = field(default="echo-answer", kw_only=True)

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        text = echo(exchange.request)
        good = json.loads(exchange.write_content(exchange.request))
        changed = self.change(good, text)
        content = changed if isinstance(changed, str) else json.dumps(changed)
        Answer(content, **self.fields(text)).play(exchange)


def _chunk(delta: Any, finish_reason: Any = None, **more: Any) -> dict[str, Any]:
    return {"model": "m1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], **more}


def _same(good: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    return good


def _card(**changes: Callable[[str], Any]) -> Callable[[Mapping[str, Any], str], Any]:
    """Return a change that sets these fields of each card."""

    def change(good: Mapping[str, Any], text: str) -> Any:
        return {"cards": [{**card, **{name: make(text) for name, make in changes.items()}} for card in good["cards"]]}

    return change


ECHOES: dict[str, Step] = {
    **{f"status-{n}": EchoReply(n) for n in (302, 400, 401, 402, 403, 404, 408, 413, 422, 429, 500, 501, 503, 529)},
    "status-299": EchoReply(299),
    "error-as-text": EchoReply(400, lambda text: {"error": text}),
    "error-as-list": EchoReply(400, lambda text: {"error": [text, {"message": text}]}),
    "message-as-object": EchoReply(500, lambda text: {"error": {"message": {text: [text]}}}),
    "plain-text": EchoReply(400, lambda text: text, "text/plain"),
    "html": EchoReply(200, lambda text: f"<html><title>{text}</title></html>", HTML),
    "whole-without-choices": EchoReply(200, lambda text: {"id": text, "model": text}),
    "whole-with-odd-choices": EchoReply(200, lambda text: {"choices": text, "model": text}),
    "whole-not-json": EchoReply(200, lambda text: "{" + text),
    "whole-with-names": EchoReply(
        200,
        lambda text: {
            "model": text,
            "choices": [{"message": {"content": "{}", "role": text}, "finish_reason": text}],
            "usage": {"prompt_tokens": text},
        },
    ),
    "error-event": EchoStream(lambda text: [_chunk({"content": "{"}), _everywhere(text)]),
    "error-event-text": EchoStream(lambda text: [{"error": text}]),
    "odd-deltas": EchoStream(
        lambda text: [
            _chunk({"role": [text], "content": [text], "tool_calls": text}),
            _chunk({"content": {text: text}, "function_call": [text]}),
            _chunk(text, "stop", system_fingerprint=[text]),
        ]
    ),
    "odd-content": EchoStream(lambda text: [_chunk({"role": {"a": text}, "content": [{"text": text}]}, "stop")]),
    "odd-usage": EchoStream(lambda text: [_chunk({"content": "{}"}, "stop", usage={"prompt_tokens": text})]),
    "odd-choices": EchoStream(lambda text: [{"model": [text], "choices": text}]),
    "odd-reason": EchoStream(lambda text: [_chunk({"content": "{}"}, text)]),
    "odd-reason-object": EchoStream(lambda text: [_chunk({"content": "{}"}, {text: text})]),
    "long-name": EchoStream(lambda text: [_chunk({"content": "{}"}, "stop", model=text.split()[0])]),
    "reasoning": EchoAnswer(_same, lambda text: {"reasoning": text}),
    "refusal": EchoAnswer(lambda good, text: "", lambda text: {"refusal": text}),
    "model-and-reason": EchoAnswer(_same, lambda text: {"model": text, "finish_reason": text}),
    "model-is-the-key": EchoAnswer(_same, lambda text: {"model": text.split()[0], "finish_reason": text.split()[0]}),
    "prose": EchoAnswer(lambda good, text: f"Sure! {text}"),
    "broken-json": EchoAnswer(lambda good, text: json.dumps(good)[:-1] + f', "{text}": {text}}}'),
    "number": EchoAnswer(lambda good, text: f'{{"cards": "{text}", "n": NaN}}'),
    "twice-the-same-name": EchoAnswer(lambda good, text: f'{{"{text}": 1, "{text}": 2}}'),
    "unknown-names": EchoAnswer(lambda good, text: {**good, text: text}),
    "unknown-names-in-cards": EchoAnswer(lambda good, text: {"cards": [{**c, text: text} for c in good["cards"]]}),
    "unstorable-below-a-name": EchoAnswer(lambda good, text: {**good, text: {"n": 10**16}}),
    "deep-below-a-name": EchoAnswer(lambda good, text: f'{{"{text}": {"[" * 200}{"]" * 200}}}'),
    "unknown-kind-of-card": EchoAnswer(_card(card_type=str)),
    "words-for-choices": EchoAnswer(_card(difficulty=str)),
    "texts-for-lists": EchoAnswer(_card(tags=str, evidence=str)),
    "lists-for-texts": EchoAnswer(_card(front=lambda t: [t], back=lambda t: {t: t}, text=lambda t: [t])),
    "quotes-that-stand-nowhere": EchoAnswer(_card(evidence=lambda t: [{"sid": t, "quote": t}])),
    "markup": EchoAnswer(_card(front=lambda t: f"<b>{t}</b>", text=lambda t: f"<b>{t}</b>")),
    "cut-off": EchoAnswer(_same, lambda text: {"finish_reason": "length"}),
}
