"""Language and theme: chosen without JavaScript, kept in the session, the language also with the operator."""

from __future__ import annotations

from flask import redirect, request, session
from flask.typing import ResponseReturnValue
from sqlalchemy import update
from sqlalchemy.orm import Session

from aijobs.operators.models import Operator
from aijobs.web.auth import current_operator
from aijobs.web.console import blueprint
from aijobs.web.console.pages import THEMES, known_page
from aijobs.web.context import LANGUAGES, services


@blueprint.post("/preferences")
def preferences() -> ResponseReturnValue:
    """Save the choice and return to the page; to the sign-in page if nobody is signed in."""
    chosen, theme = request.form.get("language"), request.form.get("theme")
    operator = current_operator()
    if chosen in LANGUAGES:
        session["language"] = chosen
        if operator is not None and operator.language != chosen:
            _remember_language(operator.id, chosen)
    if theme in THEMES:
        session["theme"] = theme
    return redirect(known_page(request.form.get("next")), 303)


def _remember_language(operator_id: str, chosen: str) -> None:
    def work(writing: Session) -> None:
        writing.execute(update(Operator).where(Operator.id == operator_id).values(language=chosen))

    services().database.write(work)
