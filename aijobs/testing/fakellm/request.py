"""The parts of a client's request that the fake server understands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT = "chat"
MODERATION = "moderation"
OTHER = "other"


class BadRequest(Exception):
    """A request that any provider answers with 400. The text is the message."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call. `key` is the whole bearer token, empty without one; `body` is `{}` if none was read."""

    kind: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    body: Mapping[str, Any] = field(repr=False)

    @property
    def key(self) -> str:
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""

    @property
    def model(self) -> str:
        return str(self.body.get("model", ""))

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def include_usage(self) -> bool:
        options = self.body.get("stream_options")
        return isinstance(options, Mapping) and options.get("include_usage") is True

    @property
    def format(self) -> str:
        """Return the type of `response_format`, by default `text`."""
        asked = self.body.get("response_format")
        return str(asked.get("type", "text")) if isinstance(asked, Mapping) else "text"

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """Return the JSON Schema of `response_format`, if one was sent."""
        asked = self.body.get("response_format")
        wrapped = asked.get("json_schema") if isinstance(asked, Mapping) else None
        schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
        return schema if isinstance(schema, Mapping) else None

    @property
    def max_tokens(self) -> int | None:
        limits = (self.body.get(name) for name in ("max_completion_tokens", "max_tokens"))
        return next((limit for limit in limits if isinstance(limit, int)), None)

    def text(self, *roles: str) -> str:
        """Return the messages of these roles (default: all), one after the other."""
        found = []
        for message in self.body.get("messages", ()):
            if isinstance(message, Mapping) and (not roles or message.get("role") in roles):
                found.append(_content(message.get("content")))
        return "\n\n".join(found)

    def check(self) -> None:
        """Raise `BadRequest` for requests that providers always refuse."""
        if self.kind == MODERATION:
            if not isinstance(self.body.get("input"), str | list):
                raise BadRequest("Missing required parameter: 'input'.")
            return
        if not self.model:
            raise BadRequest("you must provide a model parameter")
        if not isinstance(self.body.get("messages"), list) or not self.body["messages"]:
            raise BadRequest("Invalid 'messages': expected an array with at least one message.")
        if self.format == "json_object" and "json" not in self.text().lower():
            # As DeepSeek and OpenAI do: a prompt without the word fails at the first real call.
            raise BadRequest(
                "Prompt must contain the word 'json' in some form to use 'response_format' of type 'json_object'."
            )


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return ""


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. `BadRequest` for anything else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadRequest("We could not parse the JSON body of your request.") from None
    if not isinstance(value, dict):
        raise BadRequest("The JSON body of your request must be an object.")
    return value
