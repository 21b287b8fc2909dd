"""Times and durations for people, in the current language. The script writes ages in the same words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from babel.dates import format_timedelta
from babel.units import format_unit
from flask_babel import get_locale, gettext

from aijobs.clock import parse_iso, utc_now

_UNITS = (31_536_000, 2_592_000, 86_400, 3600, 60, 1)


def ago(at: datetime, now: datetime | None = None) -> str:
    """Return how long ago `at` was, or how far ahead it is, in its largest unit: `3m ago`, `3分钟前`."""
    seconds = (at - (now or utc_now())).total_seconds()
    if abs(seconds) < 1:
        return gettext("just now")
    size = next(unit for unit in _UNITS if abs(seconds) >= unit)
    whole = int(abs(seconds) // size) * size
    rounded = timedelta(seconds=whole if seconds > 0 else -whole)
    return format_timedelta(rounded, threshold=1, add_direction=True, format="narrow", locale=get_locale())


def instant(value: str | datetime | None) -> datetime | None:
    """Parse the time of a heartbeat; None if it is missing or invalid."""
    if not isinstance(value, str):
        return value
    try:
        return parse_iso(value)
    except (ValueError, OverflowError):
        return None


def exact(at: datetime) -> str:
    """Return a time as `2026-01-31 08:00:00.123 UTC`."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def duration(value: timedelta | float | None) -> str:
    """Return a duration (timedelta or seconds) with two significant figures: `850 ms`, `4.2 s`, `3 min 20 s`."""
    if value is None:
        return "–"
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    seconds = max(seconds, 0.0)
    if seconds < 1:
        return gettext("%(n)s ms", n=round(seconds * 1000))
    if seconds < 10:
        return gettext("%(n)s s", n=round(seconds, 1))
    if seconds < 60:
        return gettext("%(n)s s", n=int(seconds))
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return gettext("%(m)s min %(s)s s", m=minutes, s=rest)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return gettext("%(h)s h %(m)s min", h=hours, m=minutes)
    return gettext("%(d)s d %(h)s h", d=hours // 24, h=hours % 24)


def whole_time(value: timedelta) -> str:
    """Return a duration in the largest unit that gives a whole number: `12 hours`, `7 days`, `90 minutes`."""
    seconds = round(value.total_seconds())
    units = {"day": 86_400, "hour": 3600, "minute": 60, "second": 1}
    unit = next(name for name, size in units.items() if seconds % size == 0)
    return str(format_unit(seconds // units[unit], f"duration-{unit}", "long", locale=get_locale()))


def milliseconds(value: int | None) -> str:
    """Return `duration` of a number of milliseconds."""
    return duration(None if value is None else value / 1000)
