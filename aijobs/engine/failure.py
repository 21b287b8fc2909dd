"""Turning whatever an attempt raised into a code and a text for operators, which itself can't fail."""

from __future__ import annotations

import re
import traceback

from sqlalchemy.exc import DBAPIError

from aijobs.errors import JobError, is_code

MAX_BYTES = 16_000
# Each repetition that may fail at its end is bounded: a search of a hostile text takes as long as of any other.
_SECRETS = (
    (re.compile(r"\b(sk|ajo|key|tok)[-_][A-Za-z0-9_-]{12,}"), "[KEY]"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), r"\1 [TOKEN]"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,4000}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), "[TOKEN]"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]{0,30}://)[^\s/@:]{0,500}:[^\s/@]{0,500}@"), r"\1[CREDENTIALS]@"),
    (
        re.compile(
            r"(?i)(api[_-]?key|secret(?:[_-]key)?|password|authorization|(?:access|refresh)_token)(['\"]?\s*[:=]\s*['\"]?)[^\s'\",}]{4,}"
        ),
        r"\1\2[SECRET]",
    ),
)


def as_job_error(error: BaseException) -> JobError:
    """`error` itself where it has a code; else INTERNAL_DATABASE or INTERNAL_ERROR.

    A code that no column would hold is none: it must not cost a job the record of its failure.
    """
    if isinstance(error, JobError) and is_code(error.code):
        return error
    return JobError("INTERNAL_DATABASE" if isinstance(error, DBAPIError) else "INTERNAL_ERROR")


def internal_text(error: BaseException) -> str:
    """The error's words and stack, secrets struck out, storable everywhere, at most 16,000 bytes.

    A long text keeps its end, where the cause stands. An exception whose text can't be made is named by its class.
    """
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as unprintable:
        text = f"{type(error).__name__} (its text can't be shown: {type(unprintable).__name__})"
    # Cut before the patterns run as well: a provider's error can be megabytes long.
    text = text[-2 * MAX_BYTES :].replace("\x00", "\N{REPLACEMENT CHARACTER}")
    text = text.encode("utf-8", "replace").decode()
    for pattern, mark in _SECRETS:
        text = pattern.sub(mark, text)
    return text.encode()[-MAX_BYTES:].decode(errors="ignore")
