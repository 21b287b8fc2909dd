"""Signing in and out."""

from __future__ import annotations

import math

from flask import Response, make_response, redirect, render_template, request, session, url_for
from flask.typing import ResponseReturnValue
from flask_babel import gettext
from flask_babel import lazy_gettext as _l
from flask_wtf import FlaskForm
from wtforms import HiddenField, PasswordField, StringField
from wtforms.validators import DataRequired, Length

from aijobs.errors import ApiError
from aijobs.operators.sessions import Ended
from aijobs.web.auth import (
    LONGEST_PASSWORD,
    current_operator,
    ended_session,
    session_rules,
    sign_in,
    sign_out,
)
from aijobs.web.console import blueprint
from aijobs.web.console.pages import known_page
from aijobs.web.console.times import whole_time

_CHOSEN = ("language", "theme")
"""Preferences from before the sign-in, which are kept."""


class SignInForm(FlaskForm):
    """The sign-in form."""

    next = HiddenField()
    username = StringField(
        _l("User name"),
        [DataRequired(_l("Please fill this in.")), Length(max=100)],
        render_kw={"autocomplete": "username", "autofocus": True, "autocapitalize": "none", "spellcheck": "false"},
    )
    password = PasswordField(
        _l("Password"),
        [DataRequired(_l("Please fill this in.")), Length(max=LONGEST_PASSWORD)],
        render_kw={"autocomplete": "current-password"},
    )


@blueprint.route("/login", methods=["GET", "POST"])
def login() -> ResponseReturnValue:
    """Sign in, then redirect to the requested page if it belongs to this console."""
    form = SignInForm(next=request.args.get("next", ""))
    back = known_page(form.next.data)
    if current_operator() is not None:
        return redirect(back, 303)
    if not form.validate_on_submit():
        return _page(form, 422 if form.is_submitted() else 200)
    chosen = {name: session[name] for name in _CHOSEN if name in session}
    try:
        operator = sign_in(form.username.data or "", form.password.data or "")
    except ApiError as refused:
        return _too_often(form, refused)
    if operator is None:
        return _page(form, 401, gettext("User name or password is wrong."))
    session.update(chosen)
    return redirect(back, 303)


@blueprint.post("/logout")
def logout() -> ResponseReturnValue:
    """End the session."""
    return leave()


def leave() -> ResponseReturnValue:
    """End this session, and show the sign-in page in the chosen language and theme."""
    chosen = {name: session[name] for name in _CHOSEN if name in session}
    sign_out()
    session.update(chosen)
    return redirect(url_for("console.login"), 303)


def _too_often(form: SignInForm, refused: ApiError) -> Response:
    if refused.code != "RATE_LIMITED":
        raise refused
    seconds = math.ceil(refused.retry_after.total_seconds()) if refused.retry_after else 60
    minutes = max(1, math.ceil(seconds / 60))
    response = _page(form, 429, gettext("Too many wrong attempts. Please wait %(n)s min.", n=minutes))
    response.headers["Retry-After"] = str(seconds)
    return response


def _page(form: SignInForm, status: int, problem: str | None = None) -> Response:
    form.next.data = known_page(form.next.data)
    ended = None if form.is_submitted() else _ended_text()
    return make_response(render_template("console/session/new.html", form=form, problem=problem, ended=ended), status)


def _ended_text() -> str | None:
    """Return why the last session has ended; None if nobody was signed in."""
    ended, rules = ended_session(), session_rules()
    if ended is None:
        return None
    if ended is Ended.IDLE:
        return gettext("Your session ended: signed out after %(time)s without use.", time=whole_time(rules.idle))
    if ended is Ended.EXPIRED:
        return gettext("Your session ended: signed out %(time)s after the sign-in.", time=whole_time(rules.longest))
    if ended is Ended.REVOKED:
        return gettext("Your session ended: it was signed out elsewhere, or your account or password was changed.")
    return gettext("Your session ended. Please sign in again.")
