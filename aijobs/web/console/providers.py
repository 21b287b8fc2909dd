"""The providers page: breakers, running calls, today's sums, and closing a breaker."""

from __future__ import annotations

from typing import Any

from flask import flash, make_response, redirect, url_for
from flask.typing import ResponseReturnValue
from flask_babel import gettext

from aijobs.ai.calling.breaker import BreakerState, CircuitState
from aijobs.errors import ApiError, describe
from aijobs.operators import rights
from aijobs.operators.actions import Operating
from aijobs.web.auth import acting, get_operator, require_right
from aijobs.web.console import blueprint
from aijobs.web.console.confirmations import Confirmation, ConfirmationForm, is_confirmed
from aijobs.web.console.pages import render, whole_page
from aijobs.web.context import language, services
from aijobs.web.explanations import explain_failure

_CLOSE = "close_breaker"


@whole_page("/providers", rights.VIEW)
def providers() -> ResponseReturnValue:
    """All AI providers that are configured or were called today."""
    operator = get_operator()
    return render(
        "console/providers/index.html",
        "console/providers/_changes.html",
        found=services().monitor.providers(),
        may_fix=operator.may(rights.PROVIDER_FIX),
        may_view_usage=operator.may(rights.VIEW_USAGE),
        explain=explain_failure,
    )


@whole_page("/providers/<provider>/close", rights.VIEW)
def close_breaker(provider: str) -> ResponseReturnValue:
    """Show the confirmation of closing a breaker."""
    return _ask(provider, services().monitor.get_breaker(provider), ConfirmationForm())


@blueprint.post("/providers/<provider>/close")
@require_right(rights.PROVIDER_FIX)
def close_breaker_now(provider: str) -> ResponseReturnValue:
    """Close a breaker; a second click finds it closed."""
    state, form = services().monitor.get_breaker(provider), ConfirmationForm()
    if not is_confirmed(_CLOSE, provider, form):
        return _ask(provider, state, form, 422)
    try:
        Operating(services(), acting()).close_breaker(provider, form.given_reason())
    except ApiError as refused:
        flash(describe(refused.code).message(language()), "problem")
        return redirect(url_for("console.providers"), 303)
    if state.word == CircuitState.CLOSED:
        flash(gettext("The breaker was already closed. Nothing was changed."), "done")
    else:
        flash(gettext("Breaker closed. Calls go to this provider again."), "done")
    return redirect(url_for("console.providers"), 303)


def _ask(provider: str, state: BreakerState, form: ConfirmationForm, status: int = 200) -> ResponseReturnValue:
    form.confirmation.data = Confirmation(_CLOSE, provider).write()
    context: dict[str, Any] = {
        "provider": provider,
        "state_now": state,
        "form": form,
        "may_fix": get_operator().may(rights.PROVIDER_FIX),
        "title": gettext("Close the breaker of %(provider)s?", provider=provider),
    }
    page = render("console/providers/confirm.html", "console/providers/_confirm.html", **context)
    return make_response(page, status)
