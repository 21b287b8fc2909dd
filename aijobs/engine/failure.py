"""Turning whatever an attempt raised into a code and a text for operators, which itself can't fail."""

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
"""Packages whose errors quote what a statement was given, or what stood in the row."""
MAX_CHAIN = 100
_BECAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"
# Wider than what inputs are redacted by, since nobody learns from an internal message.
# Each repetition that may fail at its end is bounded: a search of a hostile text takes as long as of any other.
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


class DatabaseTrouble:
    """What goes wrong around attempts: an outage where the database says so, a fault of our own else.

    Whoever reads that the database is away looks there, and not for the bug that it was.
    """

    def __init__(self, logger: Any, outage: Outage, fault: str) -> None:
        """`fault` is the event of a line about a fault of our own."""
        self._logger, self._outage, self._fault = logger, outage, fault
        self._sparing = Sparing()

    def failed(self, error: Exception) -> None:
        """Say so, once a minute."""
        if isinstance(error, SQLAlchemyError):
            self._outage.failed(error)
        elif (held_back := self._sparing.may_say(type(error).__name__)) is not None:
            self._logger.error(self._fault, **fault(error), alsoFailed=held_back, where=where(error))

    def worked(self) -> None:
        """The database answers; says so once after an outage."""
        self._outage.worked()


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
    What a database or a schema says of an error may quote a row or a field, which operators see by a reveal alone: of
    those it says class, code and place.
    """
    try:
        text = "".join(_told(error, set()))
    except Exception as unprintable:
        text = f"{type(error).__name__} (its text can't be shown: {type(unprintable).__name__})"
    # Cut before the patterns run as well: a provider's error can be megabytes long.
    text = text[-2 * MAX_BYTES :].replace("\x00", "\N{REPLACEMENT CHARACTER}")
    text = text.encode("utf-8", "replace").decode()
    for pattern, mark in _SECRETS:
        text = pattern.sub(mark, text)
    return text.encode()[-MAX_BYTES:].decode(errors="ignore")


def _told(error: BaseException, told: set[int]) -> Iterator[str]:
    """What Python would print of an error and all that led to it, first cause first, each once."""
    for link, each in reversed(list(islice(_chain(error, told), MAX_CHAIN))):
        if isinstance(each, BaseExceptionGroup):
            for part in each.exceptions:
                yield from _told(part, told)
                yield "\nThe above exception is a part of the following group:\n\n"
        if each.__traceback__ is not None:
            yield "Traceback (most recent call last):\n"
            yield from traceback.format_tb(each.__traceback__)
        yield _words(each) + link


def _chain(error: BaseException, told: set[int]) -> Iterator[tuple[str, BaseException]]:
    """`error`, what led to it, what led to that, and so on; each with the words between it and the one before."""
    link, each = "", error
    while each is not None and id(each) not in told:
        told.add(id(each))
        yield link, each
        if each.__cause__ is not None:
            link, each = _BECAUSE, each.__cause__
        elif each.__context__ is not None and not each.__suppress_context__:
            link, each = _MEANWHILE, each.__context__
        else:
            return


def _words(error: BaseException) -> str:
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
    """What a database's error is by its numbers and by the schema's own names, and nothing else of its text."""
    original = getattr(error, "orig", None) or error
    diagnosis = getattr(original, "diag", None)
    told = {
        "sqlstate": getattr(original, "sqlstate", None),
        "sqlite": getattr(original, "sqlite_errorname", None),
        "errno": next((n for n in original.args[:1] if isinstance(n, int)), None),
        "table": getattr(diagnosis, "table_name", None),
        "column": getattr(diagnosis, "column_name", None),
        "constraint": getattr(diagnosis, "constraint_name", None),
        "see": getattr(error, "code", None),
    }
    return ", ".join(f"{key} {value}" for key, value in told.items() if value is not None) or "no code"
