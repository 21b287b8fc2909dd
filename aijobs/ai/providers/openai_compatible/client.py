"""One call with OpenAI's asynchronous client: one request, which leaves nothing of itself in any error.

Loaded by the first call, as it takes a second: who asks the built-in provider alone does without.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import httpx2
import openai

from aijobs.ai.catalogue import JsonMode, ProviderConfig
from aijobs.ai.output import MAX_CHARACTERS
from aijobs.ai.provider import (
    CallFacts,
    CallFailed,
    ConstraintRefused,
    GenerateAnswer,
    GenerateRequest,
)
from aijobs.ai.providers.openai_compatible.call import Limits, Received, receive
from aijobs.ai.providers.openai_compatible.names import name
from aijobs.ai.providers.openai_compatible.refusals import ServerError, failure_of, stream_failure

MAX_ERROR_BYTES = 65_536
MAX_STREAM_BYTES = 40 * MAX_CHARACTERS
"""A stream wraps each few characters in a chunk of some hundred bytes."""
_LESS: Mapping[JsonMode, JsonMode] = {"json_schema": "json_object", "json_object": "prompt"}
_BEFORE_SENDING = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class ServerClient:
    """The connections to one server, and how to talk with it. Everything runs on the loop's thread."""

    def __init__(self, config: ProviderConfig) -> None:
        self._config = config
        self._json_modes: dict[str, JsonMode] = {}
        """By model, what a server was found to take less than its configuration says."""
        self._client: openai.AsyncOpenAI | None = None

    async def close(self) -> None:
        """Close the connections that are kept; the next call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def converse(self, request: GenerateRequest, received: Received, limits: Limits) -> GenerateAnswer:
        """Ask, and take in the whole answer. `CallFailed`; `TimeoutError` at the deadline."""
        own_key = request.credential is not None
        key = request.credential.open() if request.credential else self._config.key
        received.key = key or ""
        mode = self._json_mode(request)

        async def chunks() -> AsyncGenerator[Mapping[str, Any]]:
            client = self._open_client().with_options(api_key=key or "none", max_retries=0)
            stream = await client.chat.completions.create(**self._body(request, mode))
            received.status, received.request_id = stream.response.status_code, _request_id(stream.response)
            return _mappings(stream)

        try:
            await receive(chunks, received, limits)
        except _Refused as refused:
            failure = failure_of(refused.error, own_key=own_key, constrained=mode != "prompt")
            if isinstance(failure, ConstraintRefused):
                self._json_modes[request.route.model] = _LESS[mode]
            raise failure from None
        except _Whole as whole:
            received.status, received.request_id = whole.status, whole.request_id
            received.add(whole.completion)
        except openai.APIConnectionError as error:
            raise _connection_failure(error, received.facts()) from None
        except openai.APIError as error:
            told = stream_failure(error.body, own_key=own_key)
            raise CallFailed(told.code, told.internal, received.facts()) from None
        except (openai.OpenAIError, httpx2.InvalidURL) as error:
            raise CallFailed(
                "PROVIDER_UNAVAILABLE", f"the call failed: {type(error).__name__}", received.facts()
            ) from None
        return received.answer(self._config.name)

    async def moderate(self, texts: Sequence[str], seconds: float) -> frozenset[str]:
        """The categories that the server's own moderation finds in the texts. `CallFailed`; `TimeoutError`."""
        client = self._open_client().with_options(api_key=self._config.key or "none", max_retries=0)
        try:
            async with asyncio.timeout(min(seconds, self._config.first_data_s)):
                answer = await client.moderations.create(model=self._config.moderation_model or "", input=list(texts))
        except _Refused as refused:
            raise failure_of(refused.error, own_key=False, constrained=False) from None
        except openai.APIConnectionError as error:
            raise _connection_failure(error, CallFacts()) from None
        found = [result.categories.to_dict() for result in answer.results if result.flagged]
        return frozenset(name for categories in found for name, hit in categories.items() if hit)

    def _open_client(self) -> openai.AsyncOpenAI:
        """Made on the loop's thread by the first call, and kept: connections are used again."""
        if self._client is None:
            http = httpx2.AsyncClient(
                follow_redirects=False,
                timeout=httpx2.Timeout(None, connect=self._config.connect_s, write=30, pool=self._config.connect_s),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=5),
                event_hooks={"response": [_admit]},
            )
            self._client = openai.AsyncOpenAI(
                api_key="none", base_url=self._config.base_url, http_client=http, max_retries=0
            )
            # What the client would take from the environment belongs to another program's account.
            self._client.organization = self._client.project = None
        return self._client

    def _body(self, request: GenerateRequest, mode: JsonMode) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": request.route.model,
            "messages": [
                {"role": "system", "content": request.prompt.system},
                {"role": "user", "content": request.prompt.user},
            ],
            "max_tokens": request.max_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": dict(self._config.extra_body) or None,
        }
        if mode == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif mode == "json_schema":
            schema = {"name": request.job_type, "schema": dict(request.output_schema), "strict": False}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def _json_mode(self, request: GenerateRequest) -> JsonMode:
        if not request.constrained:
            return "prompt"
        return self._json_modes.get(request.route.model, self._config.json_mode)


class _Refused(Exception):
    """The server answered with something that is no stream."""

    def __init__(self, error: ServerError) -> None:
        super().__init__(error.status)
        self.error = error


class _Whole(Exception):
    """The server sent its answer in one piece, though it was asked to stream."""

    def __init__(self, completion: Mapping[str, Any], status: int, request_id: str | None) -> None:
        super().__init__(status)
        self.completion, self.status, self.request_id = completion, status, request_id


async def _admit(response: httpx2.Response) -> None:
    """Let a stream through, bounded; read of anything else what is enough to tell what it is."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    moderated = kind == "application/json" and response.request.url.path.endswith("/moderations")
    if response.status_code == 200 and (moderated or kind == "text/event-stream"):
        response.stream = _Bounded(response.stream)
        return
    whole = response.status_code == 200 and kind == "application/json"
    body = await _beginning(response, MAX_STREAM_BYTES if whole else MAX_ERROR_BYTES)
    if whole:
        completion = json.loads(body)
        if isinstance(completion, Mapping) and completion.get("choices"):
            raise _Whole(completion, response.status_code, _request_id(response))
    raise _Refused(ServerError(response.status_code, response.headers, body, _request_id(response)))


async def _beginning(response: httpx2.Response, limit: int) -> bytes:
    body = bytearray()
    try:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) >= limit:
                break
    except httpx2.HTTPError:
        if response.status_code == 200:
            raise
        # An error's body that breaks off has told enough: its status.
    finally:
        await response.aclose()
    return bytes(body[:limit])


class _Bounded(httpx2.AsyncByteStream):
    """A stream of bytes that ends in an error before it fills the memory."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        taken = 0
        async for piece in self._stream:
            taken += len(piece)
            if taken > MAX_STREAM_BYTES:
                raise CallFailed("VALIDATION_OUTPUT_TOO_LARGE", f"the stream passed {MAX_STREAM_BYTES} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _mappings(stream: openai.AsyncStream[Any]) -> AsyncGenerator[Mapping[str, Any]]:
    async with stream:
        async for chunk in stream:
            # Of what isn't as it should be a warning would quote the value.
            yield chunk.to_dict(warnings=False)


def _request_id(response: Any) -> str | None:
    key = response.request.headers.get("authorization", "").removeprefix("Bearer ")
    return name(response.headers.get("x-request-id"), key)


def _connection_failure(error: openai.APIConnectionError, facts: CallFacts) -> CallFailed:
    """A connection that wasn't opened costs nothing; one that was lost may have, as the request was on its way."""
    cause = error.__cause__
    what = type(cause or error).__name__
    if isinstance(cause, _BEFORE_SENDING):
        return CallFailed("PROVIDER_UNAVAILABLE", f"not connected: {what}", CallFacts(billed="no"))
    return CallFailed("PROVIDER_CONNECTION_LOST", f"the connection was lost: {what}", facts)
