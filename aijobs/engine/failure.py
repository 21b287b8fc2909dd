"""Turn any exception of an attempt into a code and a text for operators. Never fails itself."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from itertools import islice
from typing import Any

from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from aijobs.errors import JobError, is_code
from aijobs.logs import Outage, Sparing, fault, where
from aijobs.screening import secret_shapes as shapes
from aijobs.validation import find_schema_faults, plain_location

MAX_BYTES = 16_000
_QUOTING = frozenset({"sqlalchemy", "sqlite3", "psycopg", "pymysql"})
"""Packages whose errors quote a statement's parameters or the content of a row."""
MAX_CHAIN = 100
_BECAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"
# Wider than the redaction of inputs: an internal message loses nothing by it.
# Each repetition that may fail at its end is bounded, so that a hostile text takes no longer to search.
_SECRETS = (
    (shapes.API_KEY, "[KEY]"),
    (re.compile(r"\b(sk|ajo|key|tok)[-_][A-Za-z0-9_-]{12,}"), "[KEY]"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), r"\1 [TOKEN]"),
    (shapes.JWT, "[TOKEN]"),
    (shapes.URL_CREDENTIALS, "[CREDENTIALS]"),
    (
        re.compile(
            r"(?i)(api[_-]?key|secret(?:[_-]key)?|password|authorization|(?:access|refresh)_token)(['\"]?\s*[:=]\s*['\"]?)[^\s'\",}]{4,}"
        ),
        r"\1\2[SECRET]",
    ),
)


class ErrorLog:
    """Logs errors around attempts: a database error as an outage, any other as a bug."""

    def __init__(self, logger: Any, outage: Outage, fault: str) -> None:
        """`fault` is the log event for a bug."""
        self._logger, self._outage, self._fault = logger, outage, fault
        self._sparing = Sparing()

    def failed(self, error: Exception) -> None:
        """Log the error, at most once a minute."""
        if isinstance(error, SQLAlchemyError):
            self._outage.failed(error)
        elif (held_back := self._sparing.may_say(type(error).__name__)) is not None:
            self._logger.error(self._fault, **fault(error), alsoFailed=held_back, where=where(error))

    def worked(self) -> None:
        """Record that the database answers. Logged once after an outage."""
        self._outage.worked()


def as_job_error(error: BaseException) -> JobError:
    """Return `error` itself if it has a code that fits the column, otherwise INTERNAL_DATABASE or INTERNAL_ERROR."""
    if isinstance(error, JobError) and is_code(error.code):
        return error
    return JobError("INTERNAL_DATABASE" if isinstance(error, DBAPIError) else "INTERNAL_ERROR")


def internal_text(error: BaseException) -> str:
    """Return the error's text and stack without secrets, storable everywhere, at most 16,000 bytes.

    A long text keeps its end, where the cause is. An exception whose text can't be made is named by its class. Errors
    of databases and schemas are named by class, code and place, because their texts may quote content, which operators
    see only by a reveal.
    """
    try:
        text = "".join(_trace(error, set()))
    except Exception as unprintable:
        text = f"{type(error).__name__} (its text can't be shown: {type(unprintable).__name__})"
    # Cut before the patterns run as well: a provider's error can be megabytes long.
    text = text[-2 * MAX_BYTES :].replace("\x00", "\N{REPLACEMENT CHARACTER}")
    text = text.encode("utf-8", "replace").decode()
    for pattern, mark in _SECRETS:
        text = pattern.sub(mark, text)
    return text.encode()[-MAX_BYTES:].decode(errors="ignore")


def _trace(error: BaseException, seen: set[int]) -> Iterator[str]:
    """Yield what Python would print for an error and its causes, first cause first, each once."""
    for link, each in reversed(list(islice(_chain(error, seen), MAX_CHAIN))):
        if isinstance(each, BaseExceptionGroup):
            for part in each.exceptions:
                yield from _trace(part, seen)
                yield "\nThe above exception is a part of the following group:\n\n"
        if each.__traceback__ is not None:
            yield "Traceback (most recent call last):\n"
            yield from traceback.format_tb(each.__traceback__)
        yield _text(each) + link


def _chain(error: BaseException, seen: set[int]) -> Iterator[tuple[str, BaseException]]:
    """Yield `error`, its cause, the cause of that and so on, each with the line that Python prints before the next."""
    link, each = "", error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield link, each
        if each.__cause__ is not None:
            link, each = _BECAUSE, each.__cause__
        elif each.__context__ is not None and not each.__suppress_context__:
            link, each = _MEANWHILE, each.__context__
        else:
            return


def _text(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        if isinstance(error, ValidationError):
            return f"{name}: {'; '.join(_fields(error))}\n"
        if any(base.__module__.partition(".")[0] in _QUOTING for base in kind.__mro__):
            return f"{name} ({_code(error)})\n"
        return "\n".join([f"{name}: {error}", *getattr(error, "__notes__", ())]) + "\n"
    except Exception as unprintable:
        return f"{name} (its text can't be shown: {type(unprintable).__name__})\n"


def _fields(error: ValidationError) -> list[str]:
    return [f"{plain_location(place) or '(all)'}: {fault}" for place, fault in find_schema_faults(error)]


def _code(error: BaseException) -> str:
    """Return a database error's numbers and the schema's own names, and nothing else of its text."""
    original = getattr(error, "orig", None) or error
    diagnosis = getattr(original, "diag", None)
    known = {
        "sqlstate": getattr(original, "sqlstate", None),
        "sqlite": getattr(original, "sqlite_errorname", None),
        "errno": next((n for n in original.args[:1] if isinstance(n, int)), None),
        "table": getattr(diagnosis, "table_name", None),
        "column": getattr(diagnosis, "column_name", None),
        "constraint": getattr(diagnosis, "constraint_name", None),
        "see": getattr(error, "code", None),
    }
    return ", ".join(f"{key} {value}" for key, value in known.items() if value is not None) or "no code"
