"""The limits of one user: active jobs, and a quota a day and a month.

No counter is kept. What was used is counted from the jobs and the usage rows, and what is reserved from the jobs that
aren't final. So nothing drifts, and the statement that ends a job also frees its reservation. The caller holds the
user's row, so that two requests at once can't both take the last place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, Subquery, bindparam, case, exists, func, literal, or_, select

from aijobs.ai.billing.forecast import NOTHING, Forecast, Forecaster
from aijobs.ai.models import AiUsageLog
from aijobs.clock import iso
from aijobs.db.clock import Clock, read_clock
from aijobs.db.database import Unit
from aijobs.db.statements import read_rows
from aijobs.definitions.definition import PLATFORM_KEY, JobDefinition
from aijobs.errors import ApiError
from aijobs.jobs.models import AiJob, QuotaReservation
from aijobs.jobs.status import OPEN, JobState

TOO_MANY_RETRY_AFTER = timedelta(seconds=5)
"""`Retry-After` while too many jobs are active: when one of them ends is unknown."""
_ACTIVE = select(func.count()).where(AiJob.user_id == bindparam("of_user"), AiJob.lifecycle_status.in_(OPEN))
COUNTED = ("jobs", "tokens", "cost_micros")


@dataclass(frozen=True)
class Quota:
    """What a user may use in a period; 0 is no limit."""

    jobs: int = 0
    tokens: int = 0
    cost_micros: int = 0


@dataclass(frozen=True)
class Limits:
    """All limits of a user; 0 is no limit."""

    active_jobs: int = 0
    day: Quota = Quota()
    month: Quota = Quota()

    @property
    def periods(self) -> tuple[tuple[str, Quota], ...]:
        """The quotas that limit anything, by period."""
        return tuple((name, quota) for name, quota in (("day", self.day), ("month", self.month)) if quota != Quota())

    @property
    def reserve(self) -> bool:
        """Whether tokens or cost are limited, so that jobs reserve them."""
        return any(quota.tokens or quota.cost_micros for _, quota in self.periods)


class UserLimits:
    """Admits new jobs. The caller holds the user's row."""

    def __init__(self, limits: Limits, forecaster: Forecaster, clock: Clock) -> None:
        self._limits, self._forecaster, self._clock = limits, forecaster, clock

    def admit(
        self, unit: Unit, job: Mapping[str, Any], definition: JobDefinition, content: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return the reservation to insert with a job of these columns; None if it needs none.

        `ApiError` TOO_MANY_JOBS or QUOTA_EXCEEDED if the user has no room for it. An operator's retry isn't refused,
        and counts as used.
        """
        by_user = job["trigger_type"] == "user"
        if by_user:
            self._check_active(unit, job["user_id"])
        if not self._limits.periods:
            return None
        now = read_clock(unit, self._clock)
        need = self._need(job, definition, content, now)
        if by_user:
            self._check_quotas(unit, job["user_id"], need, now)
        if need == NOTHING:
            return None
        return {"job_id": job["id"], "tokens": need.tokens, "cost_micros": need.cost_micros}

    def _need(
        self, job: Mapping[str, Any], definition: JobDefinition, content: Mapping[str, Any], now: datetime
    ) -> Forecast:
        """Return what the job may spend; nothing for a retry that inherits an answer."""
        if not self._limits.reserve or job.get("output_hash") is not None:
            return NOTHING
        return self._forecaster.call(definition, job["credential_mode"], content, now)

    def _check_active(self, unit: Unit, user_id: str) -> None:
        allowed = self._limits.active_jobs
        if not allowed:
            return
        active = read_rows(unit, _ACTIVE, {"of_user": user_id}).scalar_one()
        if active >= allowed:
            details = {"limit": "userActiveJobs", "used": active, "allowed": allowed}
            raise ApiError("TOO_MANY_JOBS", details, TOO_MANY_RETRY_AFTER)

    def _check_quotas(self, unit: Unit, user_id: str, need: Forecast, now: datetime) -> None:
        """Raise for the exceeded quota with the longest period."""
        periods = self._limits.periods
        starts = {"day": _day(now), "month": _month(now)}
        ends = {"day": starts["day"] + timedelta(days=1), "month": _month(starts["month"] + timedelta(days=31))}
        used = read_rows(unit, _used(user_id, {name: starts[name] for name, _ in periods}), {}).one()
        more = {"jobs": 1, "tokens": need.tokens, "cost_micros": need.cost_micros}
        for name, quota in reversed(periods):
            for what in COUNTED:
                allowed, so_far = getattr(quota, what), int(getattr(used, f"{name}_{what}"))
                if allowed and so_far + more[what] > allowed:
                    raise _exceeded(name, what, so_far, more[what], allowed, now, ends[name])


def _exceeded(
    period: str, what: str, used: int, needed: int, allowed: int, at: datetime, resets_at: datetime
) -> ApiError:
    details: dict[str, Any] = {
        "limit": f"quota{period.title()}{what.title().replace('_', '')}",
        "period": period,
        "used": used,
        "needed": needed,
        "allowed": allowed,
    }
    if needed > allowed:
        return ApiError("QUOTA_EXCEEDED", details)  # Waiting doesn't help: it needs more than a whole period's quota.
    return ApiError("QUOTA_EXCEEDED", {**details, "resetsAt": iso(resets_at)}, resets_at - at)


def _day(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0)


def _month(at: datetime) -> datetime:
    return _day(at).replace(day=1)


# --- what is used: one statement, so that a job that ends meanwhile is counted once ---------------------------------


_ONE: ColumnElement[Any] = literal(1).label("one")
"""The column that joins the parts, which have one row each."""


def _used(user_id: str, starts: Mapping[str, datetime]) -> Select[Any]:
    """Build the query for one row with `{period}_{jobs|tokens|cost_micros}` for each period."""
    jobs, spent, promised = _jobs(user_id, starts), _spent(user_id, starts), _promised(user_id)
    columns: list[ColumnElement[Any]] = []
    for name in starts:
        columns.append(jobs.c[name].label(f"{name}_jobs"))
        for what in ("tokens", "cost_micros"):
            columns.append((spent.c[f"{name}_{what}"] + promised.c[what]).label(f"{name}_{what}"))
    one_row_each = jobs.join(spent, jobs.c.one == spent.c.one).join(promised, spent.c.one == promised.c.one)
    return select(*columns).select_from(one_row_each)


def _since(column: Any, start: datetime, value: Any) -> ColumnElement[Any]:
    """Build the sum of `value` over the rows from `start` on."""
    return func.coalesce(func.sum(case((column >= start, value), else_=0)), 0)


def _jobs(user_id: str, starts: Mapping[str, datetime]) -> Subquery:
    """Count the jobs that the user created, without those that ended before a provider was called."""
    asked = exists().where(AiUsageLog.job_id == AiJob.id)
    return (
        select(_ONE, *(_since(AiJob.created_at, start, 1).label(name) for name, start in starts.items()))
        .where(
            AiJob.user_id == user_id,
            AiJob.created_at >= min(starts.values()),
            AiJob.trigger_type == "user",
            or_(AiJob.lifecycle_status.not_in((JobState.CANCELLED, JobState.FAILED)), asked),
        )
        .subquery("jobs")
    )


def _spent(user_id: str, starts: Mapping[str, datetime]) -> Subquery:
    """Sum the known usage of calls on the platform's keys. A user's own key is the user's own money."""
    at, columns = AiUsageLog.started_at, [_ONE]
    for name, start in starts.items():
        tokens = _since(at, start, AiUsageLog.prompt_tokens) + _since(at, start, AiUsageLog.completion_tokens)
        columns += [
            tokens.label(f"{name}_tokens"),
            _since(at, start, AiUsageLog.cost_micros).label(f"{name}_cost_micros"),
        ]
    where = (AiUsageLog.user_id == user_id, at >= min(starts.values()), AiUsageLog.credential_mode == PLATFORM_KEY)
    return select(*columns).where(*where).subquery("spent")


def _promised(user_id: str) -> Subquery:
    """Sum what the next call of each open job without an answer may cost: its reservation.

    Calls of earlier attempts don't lessen it, because the next one costs as much again. Calls of the running one do.
    """
    left = (
        select(
            (QuotaReservation.tokens - _now(AiUsageLog.prompt_tokens) - _now(AiUsageLog.completion_tokens)).label(
                "tokens"
            ),
            (QuotaReservation.cost_micros - _now(AiUsageLog.cost_micros)).label("cost_micros"),
        )
        .join(AiJob, AiJob.id == QuotaReservation.job_id)
        .where(AiJob.user_id == user_id, AiJob.lifecycle_status.in_(OPEN), AiJob.output_hash.is_(None))
        .subquery("left_of_job")
    )
    return select(
        _ONE, *(func.coalesce(func.sum(case((column > 0, column), else_=0)), 0).label(column.name) for column in left.c)
    ).subquery("promised")


def _now(column: Any) -> ColumnElement[Any]:
    """Build the sum over the calls of the attempt that holds the job; 0 if none does."""
    return (
        select(func.coalesce(func.sum(column), 0))
        .where(AiUsageLog.job_id == AiJob.id, AiUsageLog.attempt_no == AiJob.attempt_no, AiJob.locked_by.is_not(None))
        .correlate(AiJob)
        .scalar_subquery()
    )
