"""Faults of calls: error answers, and answers that come late, in part or never."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any, Literal

from aijobs.testing.fakellm.answer import EVENTS, JSON, Answer, Step, encode, event
from aijobs.testing.fakellm.exchange import Exchange
from aijobs.testing.fakellm.request import Request

Body = bytes | Mapping[str, Any] | str | Callable[[Request], Mapping[str, Any]]
HTML = "text/html; charset=utf-8"
GOOD = Answer()
_NARROW = 40
"""Bytes of each piece of a body that is sent in part."""


@dataclass(frozen=True)
class Reply(Step):
    """A status and a body: JSON, a text or bytes of `content_type`, or made from the request.

    `retry_after_s` becomes a Retry-After header, in seconds or, with `as_date`, as an HTTP date.
    """

    status: int
    body: Body = ""
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None
    as_date: bool = False
    name: str = field(default="reply", kw_only=True)

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        body = self.body(exchange.request) if callable(self.body) else self.body
        content = body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else encode(body)
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            at = time.time() + self.retry_after_s
            headers["Retry-After"] = formatdate(at, usegmt=True) if self.as_date else f"{self.retry_after_s:g}"
        exchange.body(self.status, self.content_type, content, headers)


@dataclass(frozen=True)
class Unless(Step):
    """Answers `reply` to a request with one of these types of `response_format`, `then` to any other."""

    formats: tuple[str, ...]
    reply: Step
    then: Step = GOOD

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        (self.reply if exchange.request.format in self.formats else self.then).play(exchange)


@dataclass(frozen=True)
class KeepAlive(Step):
    """Sends DeepSeek's keep-alive every `every_s` seconds, so many `times` (None: for ever), and then `then`.

    Blank lines before a whole answer, comments before a stream.
    """

    times: int | None = None
    every_s: float = 0.2
    then: Answer = GOOD

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        stream = exchange.request.stream
        exchange.head(200, EVENTS if stream else JSON)
        sent = 0
        while self.times is None or sent < self.times:
            exchange.write(b": keep-alive\n\n" if stream else b"\n")
            exchange.wait(self.every_s)
            sent += 1
        for piece in self.then.pieces(exchange):
            exchange.write(piece)
        exchange.finish()


@dataclass(frozen=True)
class Hang(Step):
    """Sends nothing, or the headers and then nothing, until the client leaves."""

    after_headers: bool = False

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        if self.after_headers:
            exchange.head(200, EVENTS if exchange.request.stream else JSON)
        exchange.wait(None)


@dataclass(frozen=True)
class Drip(Step):
    """Sends `then` slowly: an event of a stream, or a byte of a whole answer, every `every_s` seconds."""

    every_s: float = 0.5
    then: Answer = GOOD

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        pieces = _head_and_pieces(self.then, exchange, 1)
        for piece in pieces:
            exchange.write(piece)
            exchange.wait(self.every_s)
        exchange.finish()


@dataclass(frozen=True)
class Break(Step):
    """An answer that breaks off after the part `after` (0 to 1) of its pieces, in the way `how`.

    `stall`: nothing more comes. `reset`: RST. `close`: the connection ends before the body does. `end`: the body ends
    properly, as if that were all. `error`: an error event ends the stream.
    """

    how: Literal["stall", "reset", "close", "end", "error"]
    after: float = 0.5
    then: Answer = GOOD

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        if self.how == "error" and not exchange.request.stream:
            exchange.body(200, JSON, encode(STREAM_ERROR))
            return
        pieces = _head_and_pieces(self.then, exchange, _NARROW, in_chunks=self.how == "end")
        for piece in pieces[: int(len(pieces) * self.after)]:
            exchange.write(piece)
        if self.how == "stall":
            exchange.wait(None)
        elif self.how == "reset":
            exchange.reset()
        elif self.how == "close":
            exchange.close()
        elif self.how == "error":
            exchange.write(event(STREAM_ERROR))
        exchange.finish()


STREAM_ERROR = {
    "error": {"message": "The server had an error while processing your request.", "type": "server_error", "code": None}
}


@dataclass(frozen=True)
class Vanish(Step):
    """No answer: the connection is reset or closed, before or `after_work`, which is billed."""

    how: Literal["reset", "close"]
    after_work: bool = False

    def play(self, exchange: Exchange) -> None:
        """Answer the call."""
        if self.after_work:
            Answer().pieces(exchange)
        if self.how == "reset":
            exchange.reset()
        exchange.close()


def _head_and_pieces(answer: Answer, exchange: Exchange, width: int, *, in_chunks: bool = False) -> list[bytes]:
    """Send the headers of an answer, and return its body in pieces: the events of a stream, `width` bytes of anything
    else.
    """
    pieces = answer.pieces(exchange)
    if exchange.request.stream:
        exchange.head(200, EVENTS)
        return pieces
    (body,) = pieces
    exchange.head(200, JSON, length=None if in_chunks else len(body))
    return [body[start : start + width] for start in range(0, len(body), width)]
