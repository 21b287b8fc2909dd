"""Read requests strictly: bodies, parameters and headers, with each fault named by its field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Any

from flask import request

from aijobs.canonical import MAX_DEPTH, MAX_INTEGER, find_faults, identifier_fault
from aijobs.errors import ApiError, InputInvalid
from aijobs.monitor.keyset import DEFAULT_LIMIT, MAX_LIMIT
from aijobs.monitor.monitor import is_id
from aijobs.operators.audit import LONGEST_REASON
from aijobs.texts import clean_text

MOST_FAULTS = 20
LONGEST_PATH = 200

# A string (even without an end), or a bracket. Possessive, so that no text makes it slow.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


# --- bodies --------------------------------------------------------------------------------------------------


def read_json_object() -> dict[str, Any]:
    """Return the request's body as a JSON object.

    `UNSUPPORTED_MEDIA_TYPE`, `PAYLOAD_TOO_LARGE`; `BAD_REQUEST` with a reason if it can't be read; `INPUT_INVALID`
    names each field with a NUL, half a surrogate pair or a number that is too large.
    """
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if request.mimetype != "application/json" or charset not in ("utf-8", "utf8"):
        raise ApiError("UNSUPPORTED_MEDIA_TYPE")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError("UNSUPPORTED_MEDIA_TYPE")
    return parse_json_object(_read_body())


def _read_body() -> bytes:
    """Return the whole body; `PAYLOAD_TOO_LARGE` if it was cut at the limit, as Flask does without a Content-Length."""
    data = request.get_data()
    limit = request.max_content_length
    if request.content_length is None and limit is not None and len(data) >= limit:
        raise ApiError("PAYLOAD_TOO_LARGE")
    return data


def read_optional_object(allowed: Collection[str]) -> dict[str, Any]:
    """Return the body like `read_object`; without a body, an empty object."""
    return read_object(allowed) if _read_body() else {}


def read_object(allowed: Collection[str]) -> dict[str, Any]:
    """Return the body like `read_json_object`; `INPUT_INVALID` names fields that aren't in `allowed`."""
    found = read_json_object()
    unknown = [(name[:100], "unknown field") for name in found if name not in allowed]
    if unknown:
        raise InputInvalid(unknown[:MOST_FAULTS])
    return found


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Return `raw` as a JSON object; see `read_json_object` for errors."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _unreadable("not_utf8") from None
    if _is_too_deep(text):
        raise _unreadable("too_deep")
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_int=_parse_int, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        raise _unreadable("not_json") from None
    if not isinstance(value, dict):
        raise _unreadable("not_an_object")
    faults = [(path[:LONGEST_PATH] or "(body)", fault) for path, fault in islice(find_faults(value), MOST_FAULTS)]
    if faults:
        raise InputInvalid(faults)
    return value


def _unreadable(reason: str) -> ApiError:
    return ApiError("BAD_REQUEST", {"reason": reason})


def _is_too_deep(text: str) -> bool:
    """Return whether it is nested too deeply. Checked before parsing, because a deep body would exhaust the parser's
    stack.
    """
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        first = found.group()[0]
        if first in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif first in "]}":
            depth -= 1
    return False


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _parse_int(digits: str) -> Any:
    # Converting many digits takes long, and Python refuses some thousand.
    return int(digits) if len(digits) <= 20 else MAX_INTEGER + 1


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _unreadable("duplicate_key")
    return found


def read_optional_reason(body: Mapping[str, Any]) -> str | None:
    """Return the field `reason` like `read_reason`; None if it is missing or null."""
    return None if body.get("reason") is None else read_reason(body)


def read_reason(body: Mapping[str, Any]) -> str:
    """Return the field `reason`: 1 to 1,000 printable characters."""
    given = body.get("reason")
    reason = clean_text(given) if isinstance(given, str) else ""
    if not 1 <= len(reason) <= LONGEST_REASON:
        raise InputInvalid([("reason", f"must be a reason of 1 to {LONGEST_REASON} characters")])
    return reason


# --- parameters and headers ----------------------------------------------------------------------------------


def read_parameters(allowed: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Return the query parameters, each parsed by its function (`ValueError` says what is wrong).

    `INPUT_INVALID` names every parameter that is unknown, repeated or invalid.
    """
    found: dict[str, Any] = {}
    faults: list[tuple[str, str]] = []
    for name, values in request.args.lists():
        if name not in allowed:
            faults.append((name[:100], "unknown parameter"))
        elif len(values) > 1:
            faults.append((name, "must be given only once"))
        else:
            try:
                found[name] = allowed[name](values[0])
            except ValueError as error:
                faults.append((name, str(error)))
    if faults:
        raise InputInvalid(faults[:MOST_FAULTS])
    return found


def read_no_parameters() -> None:
    """Raise `INPUT_INVALID` for any query parameter."""
    read_parameters({})


def read_job_id() -> str:
    """Return the only query parameter, `jobId`. `INPUT_INVALID` without it, `JOB_NOT_FOUND` if it can't be a
    job's id.
    """
    job_id = read_parameters({"jobId": read_text}).get("jobId")
    if job_id is None:
        raise InputInvalid([("jobId", "must be given")])
    if not is_id(job_id):
        raise ApiError("JOB_NOT_FOUND")
    return str(job_id)


def read_text(text: str) -> str:
    """Parse a text that isn't empty: an empty filter would select everything."""
    if not text:
        raise ValueError("must not be empty")
    return text


def read_limit(text: str) -> int:
    """Parse a page's length: 1 to 100."""
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise ValueError(f"must be a number from 1 to {MAX_LIMIT}")
    return int(text)


def read_flag(text: str) -> bool:
    """Parse `true` or `false`."""
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


def read_cursor(text: str) -> str:
    """Parse a cursor; the list checks the rest."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,500}", text):
        raise ValueError("not a cursor of this list")
    return text


PAGE_PARAMETERS: Mapping[str, Callable[[str], Any]] = {"cursor": read_cursor, "limit": read_limit}


def page_of(parameters: Mapping[str, Any]) -> tuple[str | None, int]:
    """Return cursor and limit of the parameters."""
    return parameters.get("cursor"), parameters.get("limit", DEFAULT_LIMIT)


def read_idempotency_key() -> str | None:
    """Return the header `Idempotency-Key`, as UTF-8; `INPUT_INVALID` if it is no identifier."""
    header = request.headers.get("Idempotency-Key")
    if header is None:
        return None
    try:
        key = header.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise InputInvalid([("Idempotency-Key", "must be UTF-8")]) from None
    fault = identifier_fault(key)
    if fault:
        raise InputInvalid([("Idempotency-Key", fault)])
    return key
