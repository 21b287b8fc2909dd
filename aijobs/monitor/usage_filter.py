"""The filter of usage sums and their groups, for API and console."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, func
from sqlalchemy.orm import InstrumentedAttribute

from aijobs.ai.models import AiUsageLog
from aijobs.clock import iso
from aijobs.errors import InputInvalid
from aijobs.jobs.models import AiJob
from aijobs.monitor import filters

LONGEST = timedelta(days=366)
"""Maximum period of one sum."""
USUAL_DAYS = 30
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)

Grouped = ColumnElement[Any] | InstrumentedAttribute[Any]

GROUPS: Mapping[str, Mapping[str, Grouped]] = {
    "day": {"day": func.date(AiUsageLog.started_at)},
    "jobType": {"job_type": AiJob.job_type},
    "provider": {"provider": AiUsageLog.provider},
    "model": {"provider": AiUsageLog.provider, "model": AiUsageLog.model},
    "user": {"user_id": AiUsageLog.user_id},
}
"""The groups of sums: the fields of `UsageGroup` that identify a group, and the column of each."""


@dataclass(frozen=True)
class UsageFilter:
    """Selects calls. A field that is None selects all."""

    since: datetime | None = None
    """Started at this time or later."""
    until: datetime | None = None
    """Started before this time."""
    user_id: str | None = None
    job_type: str | None = None
    group_by: str = "day"
    """A key of `GROUPS`."""

    @classmethod
    def parse(cls, parameters: Mapping[str, str], now: datetime) -> UsageFilter:
        """Return the filter of an address's `parameters` (camelCase names). Default: the UTC day of `now` and the 29
        days before it.

        Empty values select all, because a form sends its empty fields too. `InputInvalid` names every invalid
        parameter. Unknown names are ignored.
        """
        found: dict[str, Any] = {}
        faults: list[tuple[str, str]] = []
        for parameter, (name, read) in PARAMETERS.items():
            text = parameters.get(parameter, "")
            try:
                if text != "":
                    found[name] = read(text)
            except ValueError as error:
                faults.append((parameter, str(error)))
        if faults:
            raise InputInvalid(faults)
        return cls.within(found, now)

    @classmethod
    def within(cls, found: Mapping[str, Any], now: datetime) -> UsageFilter:
        """Return the filter of these fields, with the default period if they name none. `InputInvalid` names `from` if
        the period is too long, or ends before it begins.
        """
        until = found.get("until") or _midnight(now) + timedelta(days=1)
        last_day = _midnight(until - timedelta(microseconds=1))
        since = found.get("since") or max(last_day - timedelta(days=USUAL_DAYS - 1), _EARLIEST)
        if not timedelta() <= until - since <= LONGEST:
            raise InputInvalid([("from", f"must be before to, by at most {LONGEST.days} days")])
        return cls(**{**found, "since": since, "until": until})

    def query(self, **changes: Any) -> dict[str, str]:
        """Return the parameters of this filter with `changes` (field names), for a link. Unset ones are left out."""
        changed = replace(self, **changes)
        found = {_SPELLINGS[f.name]: getattr(changed, f.name) for f in fields(changed)}
        if found["groupBy"] == UsageFilter.group_by:
            del found["groupBy"]
        return {name: iso(v) if isinstance(v, datetime) else str(v) for name, v in found.items() if v is not None}

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the conditions on a call's row, or on its job's."""
        found: list[ColumnElement[bool]] = []
        if self.user_id is not None:
            found.append(AiUsageLog.user_id == self.user_id)
        if self.job_type is not None:
            found.append(AiJob.job_type == self.job_type)
        if self.since is not None:
            found.append(AiUsageLog.started_at >= self.since)
        if self.until is not None:
            found.append(AiUsageLog.started_at < self.until)
        return found

    @property
    def asks_jobs(self) -> bool:
        """Return whether the query must join the jobs."""
        return self.job_type is not None or self.group_by == "jobType"


def _midnight(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0)


def _read_group(text: str) -> str:
    if text not in GROUPS:
        raise ValueError(f"must be one of {', '.join(GROUPS)}")
    return text


PARAMETERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "from": ("since", filters.PARAMETERS["createdFrom"][1]),
    "to": ("until", filters.PARAMETERS["createdTo"][1]),
    "userId": ("user_id", filters.PARAMETERS["userId"][1]),
    "jobType": ("job_type", filters.PARAMETERS["jobType"][1]),
    "groupBy": ("group_by", _read_group),
}
"""The parameters of an address: the field that each sets, and its parser."""

_SPELLINGS = {field: parameter for parameter, (field, _) in PARAMETERS.items()}
