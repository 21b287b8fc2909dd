"""The outbox page: waiting, sent and dead events, and the requeue of a dead end event."""

from __future__ import annotations

from typing import Any

from flask import flash, make_response, redirect, render_template, request, url_for
from flask.typing import ResponseReturnValue
from flask_babel import gettext

from aijobs.errors import ApiError, InputInvalid, describe
from aijobs.monitor.keyset import Page
from aijobs.monitor.monitor import is_id
from aijobs.monitor.views import OutboxRow
from aijobs.operators import rights
from aijobs.operators.actions import Operating
from aijobs.outbox.models import OutboxEventType, OutboxState
from aijobs.web.auth import acting, get_operator, require_right
from aijobs.web.console import blueprint
from aijobs.web.console.confirmations import Confirmation, ConfirmationForm, is_confirmed
from aijobs.web.console.pages import render, whole_page
from aijobs.web.context import language, services

PER_PAGE = 50
EVENT_TYPES = tuple(OutboxEventType)
_REQUEUE = "requeue"


@whole_page("/outbox", rights.VIEW)
def outbox() -> ResponseReturnValue:
    """The state of the outbox and its events, one page at a time."""
    try:
        status, event_type = _one_of("status", tuple(OutboxState)), _one_of("eventType", EVENT_TYPES)
        page = services().monitor.list_outbox(status, event_type, request.args.get("cursor"), PER_PAGE)
        code = 200
    except InputInvalid:
        status, event_type, page, code = None, None, Page[OutboxRow]((), None), 422
    return make_response(_page(page, status, event_type, code != 200), code)


@blueprint.get("/outbox/changes")
@require_right(rights.VIEW)
def outbox_changes() -> ResponseReturnValue:
    """The numbers of the outbox, for polling."""
    health = services().monitor.outbox_status()
    return render_template("console/outbox/_changes.html", health=health, statuses=OutboxState)


@whole_page("/outbox/<event_id>/requeue", rights.VIEW)
def requeue(event_id: str) -> ResponseReturnValue:
    """Show the confirmation of a requeue."""
    return _ask(_require_id(event_id), ConfirmationForm())


@blueprint.post("/outbox/<event_id>/requeue")
@require_right(rights.OUTBOX_FIX)
def requeue_event(event_id: str) -> ResponseReturnValue:
    """Make a dead end event pending again."""
    event_id, form = _require_id(event_id), ConfirmationForm()
    if not is_confirmed(_REQUEUE, event_id, form):
        return _ask(event_id, form, 422)
    try:
        Operating(services(), acting()).requeue(event_id, form.given_reason())
    except ApiError as refused:
        if refused.http_status == 404:
            raise
        flash(_refusal(refused), "problem")
        return redirect(url_for("console.outbox", status=OutboxState.DEAD), 303)
    flash(gettext("The event is pending again, and is sent within a few seconds."), "done")
    return redirect(url_for("console.outbox"), 303)


def _page(page: Page[OutboxRow], status: str | None, event_type: str | None, fault: bool) -> str:
    return render(
        "console/outbox/index.html",
        "console/outbox/_list.html",
        health=services().monitor.outbox_status(),
        page=page,
        status=status,
        event_type=event_type,
        fault=fault,
        statuses=OutboxState,
        event_types=EVENT_TYPES,
        may_fix=get_operator().may(rights.OUTBOX_FIX),
    )


def _ask(event_id: str, form: ConfirmationForm, status: int = 200) -> ResponseReturnValue:
    form.confirmation.data = Confirmation(_REQUEUE, event_id).write()
    context: dict[str, Any] = {
        "event_id": event_id,
        "form": form,
        "may_fix": get_operator().may(rights.OUTBOX_FIX),
        "title": gettext("Send this event again?"),
    }
    return make_response(render("console/outbox/confirm.html", "console/outbox/_confirm.html", **context), status)


def _require_id(event_id: str) -> str:
    """Return the id; NOT_FOUND if it doesn't have the form of one."""
    if not is_id(event_id):
        raise ApiError("NOT_FOUND")
    return event_id


def _refusal(refused: ApiError) -> str:
    if refused.code == "JOB_NOT_RETRYABLE":
        return gettext("Only a dead end event can be sent again. For a dead enqueue event, retry its job.")
    return describe(refused.code).message(language())


def _one_of(name: str, allowed: tuple[str, ...]) -> str | None:
    """Return the parameter, or None; `InputInvalid` if it isn't one of `allowed`."""
    value = request.args.get(name)
    if value is not None and value not in allowed:
        raise InputInvalid([(name, f"must be one of {', '.join(allowed)}")])
    return value
