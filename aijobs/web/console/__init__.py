"""The operator console: pages rendered on the server, enriched by htmx, which work without JavaScript."""

from __future__ import annotations

from datetime import timedelta

from flask import Blueprint, Flask, Response, current_app, redirect, request, url_for
from flask.typing import ResponseReturnValue
from flask_wtf.csrf import CSRFError

from aijobs.clock import iso
from aijobs.errors import ApiError
from aijobs.web.auth import current_operator, login_manager
from aijobs.web.money import format_money

blueprint = Blueprint("console", __name__, url_prefix="/console")


@blueprint.errorhandler(CSRFError)
def _csrf_refused(_error: CSRFError) -> ResponseReturnValue:
    """Send a client that isn't signed in any more to the sign-in page. Only a signed-in one can send a wrong token."""
    signing_in = request.endpoint in ("console.login", "console.preferences", "console.logout")
    if current_operator() is None and not signing_in:
        return login_manager.unauthorized()
    # A browser without cookies never has a right token, however often the form is loaded.
    has_cookie = current_app.session_interface.get_cookie_name(current_app) in request.cookies
    return current_app.handle_user_exception(ApiError("BAD_REQUEST", {"reason": "csrf" if has_cookie else "cookie"}))


@blueprint.after_request
def _vary(response: Response) -> Response:
    response.vary.update(("HX-Request", "HX-Boosted", "HX-History-Restore-Request", "Cookie"))
    return response


def init_app(app: Flask) -> None:
    """Register the pages, and the names that their templates use."""
    from aijobs.web.console import (  # noqa: F401 - each registers its views
        audit,
        confirmations,
        jobs,
        outbox,
        pages,
        preferences,
        providers,
        queues,
        session,
        sessions,
        times,
        usage,
        words,
        workers,
    )

    app.register_blueprint(blueprint)
    # The URL of a static file changes with the file (`pages.asset`).
    app.config["SEND_FILE_MAX_AGE_DEFAULT"] = timedelta(days=365)
    app.context_processor(pages.context)
    app.jinja_env.filters.update(
        ago=times.ago,
        exact=times.exact,
        iso=iso,
        instant=times.instant,
        duration=times.duration,
        milliseconds=times.milliseconds,
    )
    app.jinja_env.globals.update(
        asset=pages.asset,
        word=words.word,
        event_word=words.event_word,
        broker_cause=words.broker_cause,
        pass_word=words.pass_word,
        redaction_word=words.redaction_word,
        tone=words.tone,
        type_label=words.type_label,
        worker_name=words.worker_name,
        money=format_money,
    )
    app.jinja_env.trim_blocks = True
    app.jinja_env.lstrip_blocks = True

    @app.get("/")
    def root() -> ResponseReturnValue:
        """Redirect to the console."""
        return redirect(url_for("console.start"))


@blueprint.get("/", strict_slashes=False)
def start() -> ResponseReturnValue:
    """Redirect to the list of jobs."""
    return redirect(url_for("console.jobs"))
