"""The HTTP layer below the client: only our own headers are sent, and an answer's size is limited."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import httpx2

from aijobs.ai.catalogue import ProviderConfig
from aijobs.ai.output import MAX_CHARACTERS
from aijobs.ai.provider import CallFailed
from aijobs.ai.providers.openai_compatible.names import name
from aijobs.ai.providers.openai_compatible.refusals import ServerError

MAX_ERROR_BYTES = 65_536
MAX_WHOLE_BYTES = 8 * MAX_CHARACTERS
"""Maximum bytes of an answer in one piece: each character may be an escape of six bytes."""
MAX_STREAM_BYTES = 40 * MAX_CHARACTERS
"""Maximum bytes of a stream: it wraps every few characters in a chunk of some hundred bytes."""
_OURS = frozenset(
    "accept accept-encoding authorization connection content-length content-type host transfer-encoding "
    "user-agent".split()
)


ON_WIRE: ContextVar[Callable[[str], None] | None] = ContextVar("ON_WIRE", default=None)
"""Called with each step of the HTTP client for this task's request, to know whether it left."""


class Refused(Exception):
    """The server sent an error response."""

    def __init__(self, error: ServerError) -> None:
        super().__init__(error.status)
        self.error = error


class Whole(Exception):
    """The server sent its answer in one piece, though a stream was requested."""

    def __init__(self, completion: Mapping[str, Any], status: int, request_id: str | None) -> None:
        super().__init__(status)
        self.completion, self.status, self.request_id = completion, status, request_id


def open_http(config: ProviderConfig) -> httpx2.AsyncClient:
    """Open an HTTP client for one server. Reads have no time limit: the call decides what counts as progress."""
    return httpx2.AsyncClient(
        follow_redirects=False,
        timeout=httpx2.Timeout(None, connect=config.connect_s, write=30, pool=config.connect_s),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=5),
        event_hooks={"request": [_strip], "response": [_admit]},
    )


def request_id(response: Any) -> str | None:
    """Return the server's id of a call, if it may be logged."""
    key = response.request.headers.get("authorization", "").removeprefix("Bearer ")
    return name(response.headers.get("x-request-id"), key)


async def _strip(request: httpx2.Request) -> None:
    """Send only our own headers: the client adds some from the environment, which may name another account.

    Ask for no compression: a few kilobytes could unpack to gigabytes.
    """
    for header in [header for header in request.headers if header.lower() not in _OURS]:
        del request.headers[header]
    request.headers["accept-encoding"] = "identity"
    if (on_wire := ON_WIRE.get()) is not None:
        request.extensions["trace"] = _tracer(on_wire)


def _tracer(on_wire: Callable[[str], None]) -> Callable[[str, Any], Awaitable[None]]:
    async def trace(step: str, _info: Any) -> None:
        on_wire(step)

    return trace


async def _admit(response: httpx2.Response) -> None:
    """Accept a stream with a size limit. Of anything else read the beginning."""
    plain = response.headers.get("content-encoding", "identity").strip().lower() == "identity"
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if response.status_code == 200 and plain and kind == "text/event-stream":
        response.stream = _Bounded(response.stream, MAX_STREAM_BYTES)
        return
    if response.status_code == 200 and plain and kind == "application/json":
        if response.request.url.path.endswith("/moderations"):
            response.stream = _Bounded(response.stream, MAX_WHOLE_BYTES)
            return
        await _raise_whole(response)
    body = await _beginning(response, MAX_ERROR_BYTES)
    raise Refused(ServerError(response.status_code, response.headers, body, request_id(response)))


async def _raise_whole(response: httpx2.Response) -> None:
    body = await _beginning(response, MAX_WHOLE_BYTES + 1)
    if len(body) > MAX_WHOLE_BYTES:
        raise CallFailed("VALIDATION_OUTPUT_TOO_LARGE", f"the answer passed {MAX_WHOLE_BYTES} bytes")
    # In a thread, because all calls share this one.
    completion = await asyncio.to_thread(json.loads, body)
    if isinstance(completion, Mapping) and completion.get("choices"):
        raise Whole(completion, response.status_code, request_id(response))
    raise Refused(ServerError(response.status_code, response.headers, body[:MAX_ERROR_BYTES], request_id(response)))


async def _beginning(response: httpx2.Response, limit: int) -> bytes:
    """Return at most `limit` bytes of a body; less if an error's body breaks off, because the status is enough."""
    body = bytearray()
    try:
        async for piece in response.aiter_raw():
            body += piece
            if len(body) >= limit:
                break
    except httpx2.HTTPError:
        if response.status_code == 200:
            raise
    finally:
        await response.aclose()
    return bytes(body[:limit])


class _Bounded(httpx2.AsyncByteStream):
    """A byte stream that raises an error before it fills the memory."""

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream, self._limit = stream, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        taken = 0
        async for piece in self._stream:
            taken += len(piece)
            if taken > self._limit:
                raise CallFailed("VALIDATION_OUTPUT_TOO_LARGE", f"the stream passed {self._limit} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
