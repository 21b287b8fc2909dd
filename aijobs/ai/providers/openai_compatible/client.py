"""One call with OpenAI's asynchronous client: one request, no content in any error.

The import takes a second: `load_client` does it before an attempt's time begins, and only if a server is called.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx2
import openai

from aijobs.ai.catalogue import ProviderConfig
from aijobs.ai.provider import CallFacts, CallFailed, GenerateAnswer, GenerateRequest, LessWanted
from aijobs.ai.providers.openai_compatible.call import Limits, Received, Wire, receive
from aijobs.ai.providers.openai_compatible.refusals import failure_of, stream_failure, what_it_says
from aijobs.ai.providers.openai_compatible.terms import Terms
from aijobs.ai.providers.openai_compatible.wire import ON_WIRE, Refused, Whole, open_http, request_id

# The client imports these at its first call. If a later version lacks one, that call imports its own.
_BACKENDS = ("httpcore2", "httpcore2._backends.anyio", "anyio._backends._asyncio", "truststore")
for _late in ("openai.resources.moderations", *_BACKENDS):
    with suppress(ModuleNotFoundError):
        importlib.import_module(_late)

# With another program's OPENAI_LOG the client would log prompts and notes.
for _noisy in ("openai", "httpx2"):
    logging.getLogger(_noisy).setLevel(logging.WARNING)

_BEFORE_SENDING = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class ServerClient:
    """The connections to one server, and how to talk to it. Everything runs on the loop's thread."""

    def __init__(self, config: ProviderConfig) -> None:
        self._config = config
        self._learned: dict[str, Terms] = {}
        """The terms of each model's server, once a request with them worked."""
        self._client: openai.AsyncOpenAI | None = None

    async def close(self) -> None:
        """Close the open connections. The next call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def converse(self, request: GenerateRequest, received: Received, limits: Limits) -> GenerateAnswer:
        """Send the request and read the whole answer. `CallFailed`, `LessWanted`; `TimeoutError` at the deadline."""
        key = request.credential.open() if request.credential else self._config.key
        received.key = key or ""
        terms = request.terms or self._learned.get(request.route.model) or Terms.of(self._config)
        body = self._body(request, terms)
        ON_WIRE.set(received.wire.step)
        try:
            await self._receive(body, key, received, limits)
        except Refused as refused:
            raise _refusal(refused, request, terms, body[terms.tokens_name]) from None
        except openai.APIConnectionError as error:
            raise _connection_failure(error, received.facts()) from None
        except openai.APIError as error:
            told = stream_failure(error.body, own_key=request.credential is not None)
            raise CallFailed(told.code, told.internal, received.facts()) from None
        except (openai.OpenAIError, httpx2.InvalidURL) as error:
            why = f"the call failed: {type(error).__name__}"
            raise CallFailed("PROVIDER_UNAVAILABLE", why, received.facts()) from None
        except CallFailed as failed:
            raise CallFailed(failed.code, failed.internal, received.facts(failed.facts.billed)) from None
        answer = received.answer(self._config.name)
        self._learned[request.route.model] = terms.for_others
        return answer

    async def _receive(self, body: Mapping[str, Any], key: str | None, received: Received, limits: Limits) -> None:
        client = self._open_client()  # Before the limits begin, because it reads the machine's certificates.

        async def chunks() -> AsyncGenerator[Mapping[str, Any]]:
            # The raw JSON: the client's types would turn a token count of `true` into 1.
            stream = await client.post(
                "/chat/completions",
                body=body,
                cast_to=object,
                options={"headers": _headers(key)},
                stream=True,
                stream_cls=openai.AsyncStream[object],
            )
            received.status, received.request_id = stream.response.status_code, request_id(stream.response)
            return _mappings(stream)

        try:
            await receive(chunks, received, limits)
        except Whole as whole:
            received.status, received.request_id = whole.status, whole.request_id
            received.add(whole.completion)

    async def moderate(self, texts: Sequence[str], wire: Wire, seconds: float) -> frozenset[str]:
        """Return the categories that the server's moderation finds in the texts. `CallFailed`; `TimeoutError`."""
        ON_WIRE.set(wire.step)
        client = self._open_client()
        model, headers = self._config.moderation_model or "", _headers(self._config.key)
        try:
            async with asyncio.timeout(min(seconds, self._config.first_data_s)):
                answer = await client.moderations.create(model=model, input=list(texts), extra_headers=headers)
        except Refused as refused:
            raise failure_of(refused.error, own_key=False) from None
        except openai.APIConnectionError as error:
            raise _connection_failure(error, wire.facts) from None
        found = [result.categories.to_dict(warnings=False) for result in answer.results if result.flagged]
        return frozenset(name for categories in found for name, hit in categories.items() if hit)

    def _open_client(self) -> openai.AsyncOpenAI:
        """Return the client, created by the first call and kept. Keys go with each request."""
        if self._client is None:
            http = open_http(self._config)
            self._client = openai.AsyncOpenAI(
                api_key="none", base_url=self._config.base_url, http_client=http, max_retries=0
            )
        return self._client

    def _body(self, request: GenerateRequest, terms: Terms) -> dict[str, Any]:
        prompt = request.prompt
        body: dict[str, Any] = {
            "model": request.route.model,
            "messages": [{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.user}],
            terms.tokens_name: terms.room(request.max_output_tokens, prompt.system + prompt.user),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        mode = terms.json_mode if request.constrained else "prompt"
        if mode == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif mode == "json_schema":
            schema = {"name": request.job_type, "schema": dict(request.output_schema), "strict": False}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {**body, **self._config.extra_body}


def _headers(key: str | None) -> dict[str, Any]:
    return {"Authorization": openai.Omit() if key is None else f"Bearer {key}"}


def _refusal(refused: Refused, request: GenerateRequest, terms: Terms, asked_tokens: int) -> CallFailed:
    """Return the failure of a refusal; `LessWanted` if it is about the terms, and lesser ones exist."""
    failure = failure_of(refused.error, own_key=request.credential is not None)
    if 400 <= refused.error.status < 500 or refused.error.status == 501:
        asked = terms if request.constrained else replace(terms, json_mode="prompt")
        lesser = asked.after(what_it_says(refused.error.body).text, asked_tokens)
        if lesser is not None:
            return LessWanted(failure.internal, failure.facts, replace(request, terms=lesser))
    return failure


async def _mappings(stream: openai.AsyncStream[object]) -> AsyncGenerator[Mapping[str, Any]]:
    async with stream:
        async for chunk in stream:
            if not isinstance(chunk, Mapping):
                raise TypeError("a chunk is no object")
            yield chunk


def _connection_failure(error: openai.APIConnectionError, facts: CallFacts) -> CallFailed:
    """Return the failure of a connection. If it was lost, the call may have been billed."""
    cause = error.__cause__
    what = type(cause or error).__name__
    if isinstance(cause, _BEFORE_SENDING) or facts.billed == "no":
        return CallFailed("PROVIDER_UNAVAILABLE", f"not connected: {what}", CallFacts(billed="no"))
    return CallFailed("PROVIDER_CONNECTION_LOST", f"the connection was lost: {what}", facts)
