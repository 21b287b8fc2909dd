"""The filter of job lists, for API and console: it parses addresses, builds queries and makes links."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, or_
from sqlalchemy.orm import InstrumentedAttribute, aliased

from aijobs.canonical import identifier_fault
from aijobs.clock import iso
from aijobs.definitions.definition import JOB_TYPE, QUEUES
from aijobs.definitions.registry import job_type_name
from aijobs.errors import InputInvalid
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import JobState

_ERROR_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True)
class JobFilter:
    """Selects jobs. A field that is None (or False) selects all."""

    job_type: str | None = None
    lifecycle_status: str | None = None
    queue_name: str | None = None
    user_id: str | None = None
    error_code: str | None = None
    created_from: datetime | None = None
    """Created at this time or later."""
    created_to: datetime | None = None
    """Created before this time."""
    q: str | None = None
    """The start of a job id, user id or target id."""
    unresolved: bool = False
    """Failed jobs that were not retried."""

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> JobFilter:
        """Return the filter of an address's `parameters` (camelCase names).

        Empty values select all, because a form sends its empty fields too. `InputInvalid` names every invalid
        parameter. Unknown names are ignored.
        """
        found: dict[str, Any] = {}
        faults: list[tuple[str, str]] = []
        for parameter, (name, read) in PARAMETERS.items():
            text = parameters.get(parameter, "")
            if text == "":
                continue
            try:
                value = read(text)
            except ValueError as error:
                faults.append((parameter, str(error)))
                continue
            if found.setdefault(name, value) != value:
                faults.append((parameter, "lifecycleStatus and status differ"))
        if faults:
            raise InputInvalid(faults)
        return cls(**found)

    def query(self, **changes: Any) -> dict[str, str]:
        """Return the parameters of this filter with `changes` (field names), for a link. Unset ones are left out."""
        changed = replace(self, **changes)
        return {_SPELLINGS[f.name]: _text(value) for f in fields(changed) if (value := getattr(changed, f.name))}

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the conditions on a job's row."""
        wanted = [
            (AiJob.job_type, self.job_type),
            (AiJob.lifecycle_status, self.lifecycle_status),
            (AiJob.queue_name, self.queue_name),
            (AiJob.user_id, self.user_id),
            (AiJob.error_code, self.error_code),
        ]
        found: list[ColumnElement[bool]] = [column == value for column, value in wanted if value is not None]
        if self.created_from is not None:
            found.append(AiJob.created_at >= self.created_from)
        if self.created_to is not None:
            found.append(AiJob.created_at < self.created_to)
        if self.q is not None:
            found.append(or_(*(starts_with(c, self.q) for c in (AiJob.id, AiJob.user_id, AiJob.target_id))))
        if self.unresolved:
            child = aliased(AiJob)
            found += [AiJob.lifecycle_status == JobState.FAILED, ~exists().where(child.parent_job_id == AiJob.id)]
        return found


def starts_with(column: InstrumentedAttribute[str], start: str) -> ColumnElement[bool]:
    """Build the condition that `column` begins with `start`: a range, which every database's index serves."""
    end = _successor(start)
    return column >= start if end is None else and_(column >= start, column < end)


def _successor(start: str) -> str | None:
    """Return the smallest text, by code points, that is greater than every text beginning with `start`."""
    while start:
        last = ord(start[-1])
        if last < 0x10FFFF:
            following = 0xE000 if last == 0xD7FF else last + 1
            return start[:-1] + chr(following)
        start = start[:-1]
    return None


def _read_identifier(text: str) -> str:
    fault = identifier_fault(text)
    if fault:
        raise ValueError(fault)
    return text


def _read_job_type(text: str) -> str:
    name = job_type_name(text)
    if not re.fullmatch(JOB_TYPE, name):
        raise ValueError("not a job type's name")
    return name


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return read


def _read_error_code(text: str) -> str:
    if not _ERROR_CODE.fullmatch(text):
        raise ValueError("not an error code")
    return text


def _read_flag(text: str) -> bool:
    return _one_of("true", "false")(text) == "true"


def _read_instant(text: str, *, end_of_day: bool = False) -> datetime:
    """Return an ISO 8601 time (UTC without an offset), or a date, which means its whole day."""
    try:
        at = datetime.fromisoformat(text)
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
        if end_of_day and _DATE.fullmatch(text):
            at += timedelta(days=1)
    except (ValueError, OverflowError):
        raise ValueError("write a time as 2026-01-31T08:00:00Z, with + written as %2B") from None
    if not 1970 <= at.year <= 9998:
        raise ValueError("must be between 1970 and 9998")
    return at


def _read_end(text: str) -> datetime:
    return _read_instant(text, end_of_day=True)


_read_status = _one_of(*JobState)

PARAMETERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "jobType": ("job_type", _read_job_type),
    "lifecycleStatus": ("lifecycle_status", _read_status),
    "status": ("lifecycle_status", _read_status),
    "queueName": ("queue_name", _one_of(*QUEUES)),
    "userId": ("user_id", _read_identifier),
    "errorCode": ("error_code", _read_error_code),
    "createdFrom": ("created_from", _read_instant),
    "createdTo": ("created_to", _read_end),
    "q": ("q", _read_identifier),
    "unresolved": ("unresolved", _read_flag),
}
"""The parameters of an address: the field that each sets, and its parser."""

_SPELLINGS = {field: parameter for parameter, (field, _) in reversed(PARAMETERS.items())}


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        return iso(value)
    return "true" if value is True else str(value)
