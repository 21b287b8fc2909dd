"""What a server's error means: status, headers and body to a code, and whether the call may be on the bill.

Nothing of a body is quoted, in no message: it may repeat the key and the learner's notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from aijobs.ai.provider import CallFacts, CallFailed, ConstraintRefused
from aijobs.ai.providers.openai_compatible.names import is_word
from aijobs.clock import utc_now

_SAFETY = re.compile(r"content exists risk|content[_ ](?:filter|policy)|content management policy|safety system")
_TOO_LONG = re.compile(
    r"context[_ ](?:length|window|size)|maximum (?:context|input|prompt|model)|(?:prompt|input) is too long"
    r"|too many (?:input )?tokens|reduce the length"
)
_CONSTRAINT = re.compile(r"response_?format|json_?schema|json_?object|guided|grammar|structured output")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_NO_MONEY = re.compile(r"insufficient[_ ](?:quota|balance|funds)|exceeded your current quota|billing")
_TRY_AGAIN = frozenset({408, 409, 425, 429})
_NOT_BILLED = frozenset({429, 503, 529})
"""Turned away at the door. Of a 500, 502 or 504 nobody knows whether the work was done behind it."""


@dataclass(frozen=True)
class ServerError:
    """An answer that is none: `body` is as much of it as was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    request_id: str | None = None
    """Its own name for the call, where it may be told."""


def failure_of(error: ServerError, *, own_key: bool, constrained: bool) -> CallFailed:
    """The failure that `error` is. `own_key`: a user's key paid; `constrained`: a `response_format` was asked for."""
    facts = CallFacts(
        billed="no" if error.status < 500 or error.status in _NOT_BILLED else "unknown",
        http_status=error.status,
        request_id=error.request_id,
    )
    message, words = _told(error.body)
    named = f"the server answered {error.status}" + (f" ({', '.join(words)})" if words else "")
    searched = " ".join((message, *words)).lower()
    if error.status < 300:
        unknown = replace(facts, billed="unknown")
        return CallFailed("PROVIDER_UNAVAILABLE", f"{named} with no answer of a model", unknown)
    if error.status < 400:
        return CallFailed("INTERNAL_CONFIG", f"{named}: a redirect, which is not followed", facts)
    if error.status == 413 or (error.status < 500 and _TOO_LONG.search(searched)):
        return CallFailed("VALIDATION_INPUT_TOO_LARGE", named, facts)
    if error.status < 500 and _SAFETY.search(searched):
        return CallFailed("CONTENT_SAFETY_PROVIDER", named, facts)
    if error.status in (401, 403):
        return CallFailed("CREDENTIAL_INVALID" if own_key else "CREDENTIAL_PLATFORM_INVALID", named, facts)
    if error.status == 402 or (error.status in (403, 429) and _NO_MONEY.search(searched)):
        return CallFailed("CREDENTIAL_INSUFFICIENT_BALANCE" if own_key else "PROVIDER_ACCOUNT_EXHAUSTED", named, facts)
    if error.status in (400, 404, 415, 422, 501) and constrained and _CONSTRAINT.search(searched):
        return ConstraintRefused(named, facts)
    if error.status in _TRY_AGAIN or error.status >= 500:
        code = "PROVIDER_RATE_LIMITED" if error.status == 429 else "PROVIDER_UNAVAILABLE"
        return CallFailed(code, named, facts, retry_after=retry_after(error.headers))
    return CallFailed("INTERNAL_CONFIG", named, facts)


def stream_failure(body: Any, *, own_key: bool) -> CallFailed:
    """The failure that an error event in the middle of a stream is: the work was begun, and may be billed."""
    words = _words(body) if isinstance(body, Mapping) else []
    status = next((int(word) for word in words if word.isdigit() and 400 <= int(word) < 600), 500)
    told = failure_of(
        ServerError(status, {}, json.dumps({"error": body}, default=str).encode()), own_key=own_key, constrained=False
    )
    if told.code in ("INTERNAL_CONFIG", "PROVIDER_UNAVAILABLE"):
        return CallFailed("PROVIDER_STREAM_BROKEN", "the stream held an error", CallFacts())
    return CallFailed(told.code, "the stream held an error", CallFacts())


def retry_after(headers: Mapping[str, str]) -> timedelta | None:
    """When to come back, from `retry-after-ms`, or `Retry-After` in seconds or as a date; None where nothing says."""
    milliseconds, text = headers.get("retry-after-ms", "").strip(), headers.get("retry-after", "").strip()
    if _NUMBER.fullmatch(milliseconds):
        return _wait(float(milliseconds) / 1000)
    if _NUMBER.fullmatch(text):
        return _wait(float(text))
    try:
        return _wait((_date(text) - utc_now()).total_seconds()) if text else None
    except (ValueError, OverflowError):
        return None  # A server that says nothing that can be read has said nothing.


def _wait(seconds: float) -> timedelta:
    return timedelta(seconds=min(max(0.0, seconds), 86_400))


def _date(text: str) -> datetime:
    found = parsedate_to_datetime(text)
    if found.tzinfo is None:
        raise ValueError("a date without a zone")
    return found


def _told(body: bytes) -> tuple[str, list[str]]:
    """The message that an error body holds, to be searched and never shown; and its code and type, where they are
    words.
    """
    text = body.decode("utf-8", "replace")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return "", []
    if not isinstance(document, Mapping):
        return "", []
    error = document.get("error", document)
    if not isinstance(error, Mapping):
        return str(error), []
    message = error.get("message", error.get("detail", ""))
    return message if isinstance(message, str) else json.dumps(message, default=str), _words(error)


def _words(error: Mapping[str, Any]) -> list[str]:
    values = (str(error[key]) for key in ("type", "code") if isinstance(error.get(key), str | int))
    return [value for value in dict.fromkeys(values) if is_word(value)]
