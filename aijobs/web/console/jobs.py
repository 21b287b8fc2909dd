"""Jobs: the list with its filters, and one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast

from flask import make_response, redirect, render_template, request, url_for
from flask.typing import ResponseReturnValue

from aijobs.clock import iso
from aijobs.definitions.definition import QUEUES
from aijobs.errors import ApiError, InputInvalid
from aijobs.jobs.status import JobState
from aijobs.monitor.filters import PARAMETERS, JobFilter
from aijobs.monitor.keyset import Page
from aijobs.monitor.monitor import is_id
from aijobs.monitor.views import JobDetail, JobRow, WorkerRow
from aijobs.monitor.waits import due_at
from aijobs.operators import rights
from aijobs.web.auth import get_operator, require_right
from aijobs.web.console import blueprint
from aijobs.web.console.actions import ACTIONS, CANCEL, RETRY, Offer, offer
from aijobs.web.console.attempts import build_attempts
from aijobs.web.console.pages import Poll, link, render, whole_page
from aijobs.web.console.strip import build_strip
from aijobs.web.context import services
from aijobs.web.explanations import WAITS, explain_failure, explain_losses

PER_PAGE = 50
MOST_NEW = 20
"""Upper limit of the count of newer jobs."""


# --- the list ----------------------------------------------------------------------------------------------


@whole_page("/jobs", rights.VIEW)
def jobs() -> ResponseReturnValue:
    """The filtered list, one page at a time."""
    try:
        wanted = JobFilter.parse(request.args)
        page = services().monitor.list_jobs(wanted, request.args.get("cursor"), PER_PAGE)
    except InputInvalid as invalid:
        return make_response(_list(JobFilter(), Page((), None), invalid.by_field()), 422)
    return _list(wanted, page, {})


@blueprint.get("/jobs/chips")
@require_right(rights.VIEW)
def chips() -> ResponseReturnValue:
    """The states with their counts, loaded after the first paint."""
    wanted = JobFilter.parse(request.args)
    return render_template(
        "console/jobs/_chips.html", wanted=wanted, counts=services().monitor.count_jobs(_stateless(wanted)), **_STATES
    )


@blueprint.get("/jobs/changes")
@require_right(rights.VIEW)
def changes() -> ResponseReturnValue:
    """The changes of a list, for polling: jobs that have not ended, the counts, and the number of newer jobs."""
    monitor = services().monitor
    wanted = JobFilter.parse(request.args)
    rows = monitor.find_rows([job_id for job_id in request.args.get("ids", "").split(",") if is_id(job_id)][:PER_PAGE])
    return render_template(
        "console/jobs/_changes.html",
        wanted=wanted,
        rows=rows,
        offers=_row_offers(rows),
        counts=monitor.count_jobs(_stateless(wanted)),
        newer=_count_newer(wanted),
        most_new=MOST_NEW,
        poll=_list_poll(wanted, rows, request.args.get("since")),
        **_STATES,
    )


@blueprint.get("/search")
@require_right(rights.VIEW)
def search() -> ResponseReturnValue:
    """The search box: a whole job id opens the job, an error code filters by it, anything else searches by prefix."""
    text = request.args.get("q", "").strip()
    if is_id(text.lower()) and services().monitor.find_job(text.lower()) is not None:
        return redirect(url_for("console.job", job_id=text.lower()), 303)
    name = "errorCode" if text.isupper() and "_" in text else "q"
    return redirect(link("console.jobs", {name: text} if text else {}), 303)


_STATES = {"states": JobState}


def _list(wanted: JobFilter, page: Page[JobRow], faults: dict[str, str]) -> str:
    newest = page.items[0].created_at if page.items and "cursor" not in request.args else None
    return render(
        "console/jobs/index.html",
        "console/jobs/_list.html",
        wanted=wanted,
        page=page,
        rows=page.items,
        offers=_row_offers(page.items),
        faults=faults,
        given={name: request.args.get(name, "") for name in PARAMETERS},
        searched=wanted.q or wanted.error_code,
        job_types=services().registry.get_all(),
        queues=QUEUES,
        poll=_list_poll(wanted, page.items, iso(newest) if newest else None),
        **_STATES,
    )


def _stateless(wanted: JobFilter) -> JobFilter:
    return replace(wanted, lifecycle_status=None, unresolved=False)


def _row_offers(rows: Sequence[JobRow]) -> dict[str, Offer]:
    """Return the action of each row: retry for a job that has ended, otherwise cancel."""
    may = get_operator().may
    return {job.id: offer(RETRY if job.final else CANCEL, job, may) for job in rows}


def _list_poll(wanted: JobFilter, rows: Sequence[JobRow], since: str | None) -> Poll:
    """Return what a list polls: jobs that have not ended, and on the first page newer ones. A later page of ended jobs
    polls nothing.
    """
    still = ",".join(job.id for job in rows if not job.final)
    parameters = wanted.query() | ({"ids": still} if still else {}) | ({"since": since} if since else {})
    return Poll(link("console.changes", parameters), 3 if still else 10 if since else 0)


def _count_newer(wanted: JobFilter) -> int:
    since = request.args.get("since")
    if not since:
        return 0
    begin = _read_since(since) + timedelta(milliseconds=1)
    begin = max(begin, wanted.created_from) if wanted.created_from else begin
    return len(services().monitor.list_jobs(replace(wanted, created_from=begin), None, MOST_NEW).items)


def _read_since(text: str) -> datetime:
    """Parse a time like a filter; `InputInvalid`."""
    try:
        return cast(datetime, PARAMETERS["createdFrom"][1](text))
    except ValueError as error:
        raise InputInvalid([("since", str(error))]) from None


# --- one job -----------------------------------------------------------------------------------------------


@whole_page("/jobs/<job_id>", rights.VIEW)
def job(job_id: str) -> ResponseReturnValue:
    """Everything about one job."""
    return render_template("console/jobs/show.html", **_job_context(job_id))


@blueprint.get("/jobs/<job_id>/changes")
@require_right(rights.VIEW)
def job_changes(job_id: str) -> ResponseReturnValue:
    """The changes of a job, for polling: all sections, or only the explanation and the strip if nothing happened."""
    context = _job_context(job_id)
    moved = request.args.get("seen") != context["seen"]
    return render_template("console/jobs/_job_changes.html", moved=moved, live=True, **context)


def _job_context(job_id: str) -> dict[str, Any]:
    operator = get_operator()
    monitor, grace = services().monitor, services().settings.seconds("lease_grace")
    detail = monitor.get_detail(job_id, internal=operator.may(rights.INTERNAL_ERRORS))
    wait = monitor.find_wait(detail)
    last_error = detail.job.error_code or next((e.error_code for e in reversed(detail.history) if e.error_code), None)
    ended = detail.chain_total.calls - detail.chain_total.calls_under_way
    seen = f"{len(detail.history)}.{len(detail.usage)}.{ended}.{detail.job.phase}.{len(detail.chain)}"
    return {
        "detail": detail,
        "job": detail.job,
        "offers": [offer(action, detail.job, operator.may) for action in ACTIONS.values()],
        "strip": build_strip(detail, _holder_of(detail), grace),
        "attempts": build_attempts(detail),
        "wait": WAITS[wait.reason] if wait else None,
        "wait_name": wait.reason if wait else None,
        "wait_cause": wait.cause if wait else None,
        "breakers": wait.breakers if wait else (),
        "explain": explain_failure,
        "due_at": due_at(detail),
        "may_view_usage": operator.may(rights.VIEW_USAGE),
        "last_error": last_error,
        "failure": explain_failure(last_error),
        "losses": explain_losses(detail),
        "seen": seen,
        "poll": Poll(url_for("console.job_changes", job_id=job_id, seen=seen), 0 if detail.job.final else 2),
    }


def _holder_of(detail: JobDetail) -> WorkerRow | None:
    """Return the worker that holds the job's lease."""
    token = detail.job.locked_by
    if token is None or detail.job.final:
        return None
    instance = token.split("/", 1)[0]
    return next((row for row in services().monitor.workers().workers if row.instance_id == instance), None)


def get_job(job_id: str) -> JobRow:
    """Return the job's row; `JOB_NOT_FOUND`."""
    found = services().monitor.find_job(job_id)
    if found is None:
        raise ApiError("JOB_NOT_FOUND")
    return found.job
