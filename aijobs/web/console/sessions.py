"""The sessions page: operators see and end their own sessions, a SUPER_ADMIN those of all operators."""

from __future__ import annotations

from flask import flash, redirect, url_for
from flask.typing import ResponseReturnValue
from flask_babel import gettext, ngettext

from aijobs.operators import rights
from aijobs.operators.audit import AuditTrail
from aijobs.operators.models import OperatorSession
from aijobs.operators.sessions import list_sessions, revoke_session, revoke_sessions
from aijobs.web.auth import acting, get_operator, require_right, session_rules
from aijobs.web.console import blueprint
from aijobs.web.console.agents import agent_words
from aijobs.web.console.pages import render, whole_page
from aijobs.web.console.session import leave
from aijobs.web.console.times import whole_time
from aijobs.web.context import services

MOST = 200
"""Maximum sessions of a list."""


@whole_page("/sessions", rights.VIEW)
def sessions() -> ResponseReturnValue:
    """All sessions that the operator may end."""
    operator, rules = get_operator(), session_rules()
    mine, good = OperatorSession.operator_id == operator.id, rules.is_good()
    with services().database.read() as session:
        own = list_sessions(session, rules, mine, good, limit=MOST)
        others = list_sessions(session, rules, ~mine, good, limit=MOST) if operator.may(rights.OPERATORS) else None
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
def sign_out_session(session_id: str) -> ResponseReturnValue:
    """End one session: an own one, or anybody's with the right."""
    operator, s = get_operator(), services()
    if session_id == operator.session_id:
        return leave()
    which = [] if operator.may(rights.OPERATORS) else [OperatorSession.operator_id == operator.id]
    trail = AuditTrail(s.database, s.clock, acting())
    revoked = s.database.write(lambda session: revoke_session(session, trail, s.clock, session_id, *which))
    if revoked is None and which:
        flash(gettext("You have no such session."), "problem")
    else:
        _flash_count(int(bool(revoked)))
    return redirect(url_for("console.sessions"), 303)


@blueprint.post("/sessions/revoke-others")
@require_right(rights.VIEW)
def revoke_other_sessions() -> ResponseReturnValue:
    """End all other sessions of the operator."""
    operator, s = get_operator(), services()
    trail = AuditTrail(s.database, s.clock, acting())
    me, others = (operator.id, operator.username), OperatorSession.id != operator.session_id
    _flash_count(s.database.write(lambda session: revoke_sessions(session, trail, s.clock, *me, others)))
    return redirect(url_for("console.sessions"), 303)


def _flash_count(count: int) -> None:
    if count:
        flash(ngettext("%(num)s session was signed out.", "%(num)s sessions were signed out.", count), "done")
    else:
        flash(gettext("Already signed out. Nothing was changed."), "done")
