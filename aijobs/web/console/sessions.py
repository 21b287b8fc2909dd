"""Where operators are signed in: each sees and ends their own sessions, a SUPER_ADMIN those of every operator."""

from __future__ import annotations

from flask import flash, redirect, url_for
from flask.typing import ResponseReturnValue
from flask_babel import gettext, ngettext
from sqlalchemy import ColumnElement

from aijobs.operators import rights
from aijobs.operators.audit import AuditTrail
from aijobs.operators.models import OperatorSession
from aijobs.operators.sessions import list_sessions, revoke_sessions
from aijobs.web.auth import acting, get_operator, require_right, session_rules
from aijobs.web.console import blueprint
from aijobs.web.console.agents import agent_words
from aijobs.web.console.pages import render, whole_page
from aijobs.web.console.session import leave
from aijobs.web.console.times import whole_time
from aijobs.web.context import services

MOST = 200
"""Sessions that a list shows."""


@whole_page("/sessions", rights.VIEW)
def sessions() -> ResponseReturnValue:
    """All sessions that the operator may end."""
    operator, rules = get_operator(), session_rules()
    mine = OperatorSession.operator_id == operator.id
    with services().database.read() as session:
        own = list_sessions(session, rules, mine, limit=MOST)
        others = list_sessions(session, rules, ~mine, limit=MOST) if operator.may(rights.OPERATORS) else None
    return render(
        "console/sessions/index.html",
        "console/sessions/_lists.html",
        own=own,
        others=others,
        most=MOST,
        this=operator.session_id,
        agent_words=agent_words,
        idle=whole_time(rules.idle),
        longest=whole_time(rules.longest),
    )


@blueprint.post("/sessions/<session_id>/revoke")
@require_right(rights.VIEW)
def revoke_session(session_id: str) -> ResponseReturnValue:
    """Sign one session out: an own one, or with the right to it anybody's."""
    operator = get_operator()
    if session_id == operator.session_id:
        return leave()
    which = [OperatorSession.id == session_id]
    if not operator.may(rights.OPERATORS):
        which.append(OperatorSession.operator_id == operator.id)
    _revoke(*which)
    return redirect(url_for("console.sessions"), 303)


@blueprint.post("/sessions/revoke-others")
@require_right(rights.VIEW)
def revoke_other_sessions() -> ResponseReturnValue:
    """Sign the operator out everywhere else."""
    operator = get_operator()
    _revoke(OperatorSession.operator_id == operator.id, OperatorSession.id != operator.session_id)
    return redirect(url_for("console.sessions"), 303)


def _revoke(*which: ColumnElement[bool]) -> None:
    s = services()
    trail = AuditTrail(s.database, s.clock, acting())
    count = s.database.write(lambda session: revoke_sessions(session, trail, session_rules(), *which))
    if count:
        flash(ngettext("%(num)s session was signed out.", "%(num)s sessions were signed out.", count), "done")
    else:
        flash(gettext("It had ended already; nothing was changed."), "done")
