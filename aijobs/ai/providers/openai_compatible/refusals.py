"""Read a server's error: map status, headers and body to a code, and decide whether the call may be billed.

No message quotes the body, because it may repeat the key and the learner's notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from aijobs.ai.provider import CallFacts, CallFailed
from aijobs.ai.providers.openai_compatible.names import is_word
from aijobs.clock import utc_now

_READ = 400
"""Characters of a message that are read: the server's own text comes first, repeated input after it."""
_SAFETY = re.compile(r"content exists risk|content[_ ]filter|content_policy|content management policy|safety system")
_TOO_LONG = re.compile(
    r"context[_ ](?:length|window|size)|maximum (?:context|input|prompt|model)|(?:prompt|input) is too long"
    r"|too many (?:input )?tokens|reduce the length"
)
_NO_MONEY = re.compile(r"insufficient[_ ](?:quota|balance|funds|credits?)|billing_(?:hard_limit_reached|not_active)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_NOT_BILLED = frozenset({429, 503, 529})
"""Refused before any work. For 500, 502 and 504 it is unknown whether the work was done."""
_STATUS_OF: Mapping[str, int] = {
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "insufficient_quota": 429,
    "overloaded_error": 529,
    "content_filter": 400,
    "context_length_exceeded": 400,
}
"""The HTTP status that an error in mid-stream would have had."""


@dataclass(frozen=True)
class ServerError:
    """An error response. `body` is the part that was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    request_id: str | None = None
    """The server's id of the call, if it may be logged."""


@dataclass(frozen=True, slots=True)
class Said:
    """The content of an error body. `text`, in lower case, is searched and never shown; `words` may be logged."""

    text: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Rule:
    """A code for these statuses, if the body has these words (if any). `own`: a user's key paid."""

    code: str
    statuses: Collection[int]
    says: re.Pattern[str] | None = None
    own: str | None = None

    def holds(self, status: int, said: Said) -> bool:
        return status in self.statuses and (self.says is None or self.says.search(said.text) is not None)


_REFUSED, _BROKEN = range(400, 500), range(500, 600)
_RULES = (
    _Rule("PROVIDER_UNAVAILABLE", range(200, 300)),  # a page of a proxy in between
    _Rule("VALIDATION_INPUT_TOO_LARGE", {413}),
    _Rule("VALIDATION_INPUT_TOO_LARGE", _REFUSED, _TOO_LONG),
    _Rule("CONTENT_SAFETY_PROVIDER", _REFUSED, _SAFETY),
    _Rule("PROVIDER_ACCOUNT_EXHAUSTED", {402}, own="CREDENTIAL_INSUFFICIENT_BALANCE"),
    _Rule("PROVIDER_ACCOUNT_EXHAUSTED", {403, 429}, _NO_MONEY, own="CREDENTIAL_INSUFFICIENT_BALANCE"),
    _Rule("CREDENTIAL_PLATFORM_INVALID", {401, 403}, own="CREDENTIAL_INVALID"),
    _Rule("PROVIDER_RATE_LIMITED", {429}),
    _Rule("PROVIDER_UNAVAILABLE", {408, 409, 425, *_BROKEN}),
)
"""The first matching rule counts. An unknown error is our fault, and so is a redirect."""


def failure_of(error: ServerError, *, own_key: bool) -> CallFailed:
    """Return the failure of `error`. `own_key`: a user's key paid."""
    said, status = what_it_says(error.body), error.status
    billed = "no" if 300 <= status < 500 or status in _NOT_BILLED else "unknown"
    facts = CallFacts(billed=billed, http_status=status, request_id=error.request_id)
    rule = next((rule for rule in _RULES if rule.holds(status, said)), None)
    code = "INTERNAL_CONFIG" if rule is None else (rule.own if own_key and rule.own else rule.code)
    named = f"the server answered {status}" + (f" ({', '.join(said.words)})" if said.words else "")
    named += (
        " with no answer of a model" if status < 300 else ": a redirect, which is not followed" if status < 400 else ""
    )
    wait = retry_after(error.headers) if code.startswith("PROVIDER_") else None
    return CallFailed(code, named, facts, retry_after=wait)


def stream_failure(body: Any, *, own_key: bool) -> CallFailed:
    """Return the failure of an error event in mid-stream: the work had begun, and may be billed."""
    raw = json.dumps({"error": body}, default=str).encode()
    told = (_STATUS_OF.get(word) or (int(word) if word.isdigit() else 0) for word in what_it_says(raw).words)
    status = next((status for status in told if 400 <= status < 600), 500)
    code = failure_of(ServerError(status, {}, raw), own_key=own_key).code
    if code in ("INTERNAL_CONFIG", "PROVIDER_UNAVAILABLE"):
        code = "PROVIDER_STREAM_BROKEN"
    return CallFailed(code, "the stream held an error", CallFacts())


def retry_after(headers: Mapping[str, str]) -> timedelta | None:
    """Return the wait from `retry-after-ms`, or `Retry-After` in seconds or as a date; None without one."""
    milliseconds, text = headers.get("retry-after-ms", "").strip(), headers.get("retry-after", "").strip()
    if _NUMBER.fullmatch(milliseconds):
        return _wait(float(milliseconds) / 1000)
    if _NUMBER.fullmatch(text):
        return _wait(float(text))
    try:
        return _wait((_date(text) - utc_now()).total_seconds()) if text else None
    except (ValueError, OverflowError):
        return None  # An unreadable value counts as none.


def _wait(seconds: float) -> timedelta:
    return timedelta(seconds=min(max(0.0, seconds), 86_400))


def _date(text: str) -> datetime:
    found = parsedate_to_datetime(text)
    if found.tzinfo is None:
        raise ValueError("a date without a zone")
    return found


def what_it_says(body: bytes) -> Said:
    """Return the message and the codes of an error's JSON, and nothing that it repeats of the request."""
    try:
        document = json.loads(body.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return Said("", ())
    error = document.get("error", document) if isinstance(document, Mapping) else document
    if isinstance(error, str):
        return Said(error[:_READ].lower(), ())
    if not isinstance(error, Mapping):
        return Said("", ())
    message = error.get("message", error.get("detail", ""))
    named = [str(error[key]) for key in ("type", "code", "param") if isinstance(error.get(key), str | int)]
    words = tuple(dict.fromkeys(name for name in named[:2] if is_word(name)))
    return Said(" ".join((_message(message), *named)).lower(), words)


def _message(message: Any) -> str:
    """Return the beginning of a message. In FastAPI's lists each fault has kind, place and input; the input is left
    out.
    """
    if isinstance(message, str):
        return message[:_READ]
    if not isinstance(message, list):
        return ""
    faults = [fault for fault in message[:5] if isinstance(fault, Mapping)]
    return " ".join(str(fault.get(key, ""))[:_READ] for fault in faults for key in ("type", "msg", "loc"))
