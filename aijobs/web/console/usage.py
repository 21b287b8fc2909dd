"""The usage page: usage and cost of provider calls, by day or another group."""

from __future__ import annotations

from datetime import datetime, time, timedelta
from typing import Any

from flask import make_response, render_template, request
from flask.typing import ResponseReturnValue

from aijobs.clock import utc_now
from aijobs.errors import InputInvalid
from aijobs.monitor.usage_filter import GROUPS, PARAMETERS, UsageFilter
from aijobs.monitor.views import Usage, UsageGroup, UsageTotal
from aijobs.operators import rights
from aijobs.web.auth import require_right
from aijobs.web.console import blueprint
from aijobs.web.console.pages import Poll, link, render, whole_page
from aijobs.web.console.times import exact
from aijobs.web.console.words import GROUP_WORDS
from aijobs.web.context import services

EVERY_S = 15
"""Polling period: sums over a month take too long for every second."""


@whole_page("/usage", rights.VIEW_USAGE)
def usage() -> ResponseReturnValue:
    """The filtered calls of a period; by default of the last 30 days."""
    now = utc_now()
    try:
        wanted, faults = UsageFilter.parse(request.args, now), {}
        found = services().monitor.usage(wanted)
    except InputInvalid as invalid:
        wanted, faults = UsageFilter.within({}, now), invalid.by_field()
        found = Usage((), UsageTotal(), False)
    context = _context(wanted, found) | ({"poll": Poll("", 0)} if faults else {})
    page = render("console/usage/index.html", "console/usage/_list.html", **context, faults=faults)
    return make_response(page, 422 if faults else 200)


@blueprint.get("/usage/changes")
@require_right(rights.VIEW_USAGE)
def usage_changes() -> ResponseReturnValue:
    """The current sums, for polling."""
    wanted = UsageFilter.parse(request.args, utc_now())
    return render_template("console/usage/_changes.html", **_context(wanted, services().monitor.usage(wanted)))


def _context(wanted: UsageFilter, found: Usage) -> dict[str, Any]:
    given = {name: request.args.get(name, "") for name in PARAMETERS}
    set_ones = {name: text for name, text in given.items() if text}
    return {
        "wanted": wanted,
        "found": found,
        "given": given,
        "narrowing": [name for name in ("userId", "jobType") if given[name]],
        "group_words": GROUP_WORDS,
        "groups": GROUPS,
        "period": (_begin(wanted.since), _end(wanted.until)),
        "narrower": lambda group: link("console.usage", set_ones | _narrower(group)),
        "job_types": services().registry.get_all(),
        "poll": Poll(link("console.usage_changes", set_ones), EVERY_S),
    }


def _narrower(group: UsageGroup) -> dict[str, str]:
    """Return the parameters of a link to more about a group: a day's users, otherwise by day."""
    if group.day is not None:
        return {"from": group.day, "to": group.day, "groupBy": "user"}
    if group.user_id is not None:
        return {"userId": group.user_id, "groupBy": "day"}
    if group.job_type is not None:
        return {"jobType": group.job_type, "groupBy": "day"}
    return {"groupBy": "day"}


def _begin(at: datetime | None) -> str:
    return "" if at is None else at.date().isoformat() if _is_midnight(at) else exact(at)


def _end(at: datetime | None) -> str:
    """Return the last day, if the period ends with a day."""
    return "" if at is None else (at - timedelta(days=1)).date().isoformat() if _is_midnight(at) else exact(at)


def _is_midnight(at: datetime) -> bool:
    return at.time() == time()
