"""Request ids, the access log, and security headers: no foreign or inline content, no frames, no caching."""

from __future__ import annotations

import re

import structlog
from flask import Flask, Response, g, request

from aijobs.clock import Stopwatch
from aijobs.ids import new_id
from aijobs.logs import get_logger
from aijobs.web.context import is_api_request

logger = get_logger(__name__)

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'; manifest-src 'self'"
)
API_POLICY = "default-src 'none'; frame-ancestors 'none'"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEALTH = ("/healthz", "/readyz")


def init_app(app: Flask, *, production: bool) -> None:
    """Add security headers, request ids and one log line per request."""

    @app.before_request
    def begin() -> None:
        given = request.headers.get("X-Request-ID", "")
        g.request_id_given = _REQUEST_ID.fullmatch(given) is not None
        g.request_id = given if g.request_id_given else new_id()
        g.stopwatch = Stopwatch()
        structlog.contextvars.bind_contextvars(requestId=g.request_id)

    @app.after_request
    def finish(response: Response) -> Response:
        headers = response.headers
        headers["Content-Security-Policy"] = API_POLICY if is_api_request() else PAGE_POLICY
        headers["X-Content-Type-Options"] = "nosniff"
        headers["X-Frame-Options"] = "DENY"
        # Not no-referrer: over HTTPS the CSRF check compares it with the host.
        headers["Referrer-Policy"] = "same-origin"
        headers["Cross-Origin-Opener-Policy"] = "same-origin"
        headers["Cross-Origin-Resource-Policy"] = "same-origin"
        headers["Permissions-Policy"] = "camera=(), geolocation=(), microphone=()"
        if request.endpoint != "static":
            headers["Cache-Control"] = "no-store"
        if production and request.is_secure:
            headers["Strict-Transport-Security"] = "max-age=31536000"
        # A generated id differs at each call, so it is sent only with server errors, which people report.
        if "request_id" in g and (g.request_id_given or response.status_code >= 500):
            headers["X-Request-ID"] = g.request_id
        return response

    @app.after_request
    def log(response: Response) -> Response:
        if request.endpoint != "static" and request.path not in _HEALTH:
            logger.info(
                "http.request",
                method=request.method,
                # The rule, not the path, which may hold a user's text.
                route=request.url_rule.rule if request.url_rule else None,
                status=response.status_code,
                durationMs=g.stopwatch.ms if "stopwatch" in g else None,
            )
        return response

    @app.teardown_request
    def end(_error: BaseException | None) -> None:
        structlog.contextvars.unbind_contextvars("requestId")
