"""Parse a provider's text as a JSON object, strictly.

A model's answer is free text. This parser accepts what can be read in one way only, and refuses the rest. It repairs
nothing: completing a cut-off answer would save half a result.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NoReturn

from aijobs.canonical import MAX_DEPTH, MAX_INTEGER
from aijobs.errors import JobError

MAX_CHARACTERS = 1_000_000
BIDI_OVERRIDES = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that make a text look like another one. No script needs them; the direction marks U+200E and U+200F are
allowed.
"""
_OVERRIDE = re.compile(f"[{BIDI_OVERRIDES}]")
_MAY_OVERRIDE = re.compile(rf"[{BIDI_OVERRIDES}]|\\u20(?:2[a-e]|6[6-9])", re.IGNORECASE)
"""The same in JSON, possibly as an escape."""

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_FENCE = re.compile(r"(?P<before>[^`]*?)^```(?P<label>[^\n`]*)\n(?P<inside>.*)\n[ \t]*```\Z", re.DOTALL | re.MULTILINE)


class AnswerInvalid(JobError):
    """The answer can't be used. `code` says why; `faults` go into the next prompt."""

    def __init__(self, code: str, internal: str, faults: Sequence[str] = ()) -> None:
        super().__init__(code, internal, faults=tuple(faults) or (internal,))


class NotJson(AnswerInvalid):
    """VALIDATION_OUTPUT_NOT_JSON: the text isn't one strict JSON object."""

    def __init__(self, fault: str) -> None:
        super().__init__("VALIDATION_OUTPUT_NOT_JSON", fault)


class EmptyAnswer(AnswerInvalid):
    """PROVIDER_EMPTY_OUTPUT: only white space came back, which some providers send instead of an error."""

    def __init__(self) -> None:
        super().__init__("PROVIDER_EMPTY_OUTPUT", "the answer was empty")


def read_answer(text: str, finish_reason: str) -> dict[str, Any]:
    """Return the JSON object of an answer, without bidi overrides in its texts.

    VALIDATION_TRUNCATED if the provider cut it off, even if it parses: it may hold half of its items. The next prompt
    then asks for less.
    """
    if finish_reason == "length":
        raise AnswerInvalid("VALIDATION_TRUNCATED", "the answer was cut off: give fewer or shorter items")
    answer = parse_json_answer(text)
    if _MAY_OVERRIDE.search(text):
        answer = {key: _without_overrides(value) for key, value in answer.items()}
    return answer


def parse_json_answer(text: str) -> dict[str, Any]:
    """Return the JSON object in `text`, with its strings in NFC.

    `text` is the whole answer: one object, optionally after a complete think block, optionally in one code fence.
    `EmptyAnswer` for a blank answer, `NotJson` for anything else that isn't exactly one strict object, `AnswerInvalid`
    with VALIDATION_OUTPUT_TOO_LARGE beyond `MAX_CHARACTERS`.
    """
    if len(text) > MAX_CHARACTERS:
        raise AnswerInvalid("VALIDATION_OUTPUT_TOO_LARGE", f"the answer is longer than {MAX_CHARACTERS} characters")
    _refuse_unstorable(text)
    body = _unfence(_unthink(text.lstrip("\ufeff").strip()))
    if not body:
        raise EmptyAnswer
    _refuse_deep(body)
    value = _decode(body)
    if not isinstance(value, dict):
        raise NotJson("the answer must be one JSON object")
    return value


def _unthink(text: str) -> str:
    if not text.startswith(_THINK_OPEN):
        return text
    _, closed, rest = text.partition(_THINK_CLOSE)
    if not closed:
        raise NotJson("the answer ends inside its think block")
    return rest.strip()


def _unfence(text: str) -> str:
    """Return the content of the code fence that ends the answer; the text itself if it has none.

    The closing marks are searched at the end only, because marks inside a JSON string are content.
    """
    if text.startswith("{") or "```" not in text:
        return text
    fence = _FENCE.match(text.replace("\r\n", "\n"))
    if fence is None:
        raise NotJson("the answer must be one JSON object, with nothing before or after it")
    if fence["label"].strip().lower() not in ("", "json"):
        raise NotJson("the answer's code block is not JSON")
    return fence["inside"].strip()


def _refuse_deep(body: str) -> None:
    """Refuse deep nesting before decoding, because the decoder recurses."""
    depth, in_string, escaped = 0, False, False
    for character in body:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
            if depth > MAX_DEPTH:
                raise NotJson(f"the answer is nested deeper than {MAX_DEPTH} levels")
        elif character in "}]":
            depth -= 1


def _decode(body: str) -> Any:
    try:
        return json.loads(
            body,
            object_pairs_hook=_build_object,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
    except json.JSONDecodeError as error:
        # The decoder's text quotes nothing of the answer, so it may be logged and sent in the next prompt.
        raise NotJson(f"not valid JSON: {error.msg} at line {error.lineno} column {error.colno}") from None


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built: dict[str, Any] = {}
    for key, value in pairs:
        name = _clean(key)
        if name in built:
            raise NotJson("the answer has an object with the same key twice")
        built[name] = _clean_value(value)
    return built


def _clean_value(value: Any) -> Any:
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, list):
        return [_clean_value(item) for item in value]
    return value


def _clean(text: str) -> str:
    _refuse_unstorable(text)
    return unicodedata.normalize("NFC", text)


def _without_overrides(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", _OVERRIDE.sub("", value))
    if isinstance(value, list):
        return [_without_overrides(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_overrides(item) for key, item in value.items()}
    return value


def _refuse_unstorable(text: str) -> None:
    if "\x00" in text:
        raise NotJson("the answer has a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise NotJson("the answer has half of a surrogate pair") from None


def _refuse_constant(name: str) -> NoReturn:
    raise NotJson(f"{name} is not a JSON number")


def _parse_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise NotJson("the answer has a number that is too large")
    return number


def _parse_int(digits: str) -> int:
    # Check the length first: Python raises another error for thousands of digits.
    if len(digits) > 17 or abs(int(digits)) > MAX_INTEGER:
        raise NotJson("the answer has a number that is too large")
    return int(digits)


def schema_faults(errors: Sequence[tuple[str, str]]) -> AnswerInvalid:
    """Return the error of an answer that violates its schema, from pairs of field path and fault."""
    faults = [f"{field}: {message}" for field, message in errors][:5]
    return AnswerInvalid("VALIDATION_OUTPUT_SCHEMA", "; ".join(faults), faults)
