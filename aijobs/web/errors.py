"""Answer every error in one format, `{"error": {"code", "message", "details"?}}`, or as a page in the console.

No exception's text is in an answer or in the log, because it may hold a user's text.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from flask import Flask, Response, jsonify, make_response, render_template, request
from flask.typing import ResponseReturnValue
from jinja2 import TemplateNotFound
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from werkzeug.exceptions import HTTPException

from aijobs.causes import cause_of, stops_writes
from aijobs.errors import ApiError, describe
from aijobs.jobs.errors import JobGone, JobLockConflict
from aijobs.logs import fault, get_logger, where
from aijobs.web.context import is_api_request, language

logger = get_logger(__name__)

ERROR_TEMPLATE = "console/error.html"
BUSY_RETRY_AFTER = timedelta(seconds=2)

_CODES = {
    400: "BAD_REQUEST",
    401: "UNAUTHORIZED",
    403: "FORBIDDEN",
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    413: "PAYLOAD_TOO_LARGE",
    415: "UNSUPPORTED_MEDIA_TYPE",
    422: "INPUT_INVALID",
    429: "RATE_LIMITED",
    503: "SERVICE_BUSY",
}


def error_body(code: str, details: dict[str, Any] | None = None, lang: str = "en") -> dict[str, Any]:
    """Return the JSON of an error."""
    body: dict[str, Any] = {"code": code, "message": describe(code).message(lang)}
    if details:
        body["details"] = details
    return {"error": body}


def init_app(app: Flask) -> None:
    """Handle every error of `app`."""
    app.register_error_handler(ApiError, _api_error)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _any_error)


def _api_error(error: ApiError) -> ResponseReturnValue:
    response = _answer(error.code, error.http_status, error.details)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after.total_seconds())))
    if error.http_status == 401 and is_api_request():
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _http_error(error: HTTPException) -> ResponseReturnValue:
    status = error.code or 500
    code = _CODES.get(status, "BAD_REQUEST" if status < 500 else "INTERNAL_ERROR")
    response = _answer(code, status)
    if status == 405:
        for name, value in error.get_headers():
            if name == "Allow":
                response.headers["Allow"] = value
    return response


def _any_error(error: Exception) -> ResponseReturnValue:
    if isinstance(error, JobGone):
        return _api_error(ApiError("JOB_NOT_FOUND"))
    if _is_busy(error):
        _log("web.busy", error)
        return _api_error(ApiError("SERVICE_BUSY", retry_after=BUSY_RETRY_AFTER))
    _log("web.failed", error)
    return _answer("INTERNAL_ERROR", 500)


def _is_busy(error: Exception) -> bool:
    """Return whether the database was away, locked, full or read-only after all tries: worth another try later."""
    if isinstance(error, DBAPIError) and (error.connection_invalidated or stops_writes(cause_of(error))):
        return True
    return isinstance(error, OperationalError | InterfaceError | PoolTimeout | JobLockConflict)


def _log(event: str, error: Exception) -> None:
    """Log the innermost frames, and never the error's own text."""
    logger.error(
        event,
        **fault(error),
        where=where(error),
        method=request.method,
        route=request.url_rule.rule if request.url_rule else None,
    )


def _answer(code: str, status: int, details: dict[str, Any] | None = None) -> Response:
    lang = language()
    if is_api_request():
        response = jsonify(error_body(code, details, lang))
    else:
        response = make_response(_page(code, status, details, lang))
    response.status_code = status
    response.headers["Content-Language"] = lang
    response.vary.add("Accept-Language")
    return response


def _page(code: str, status: int, details: dict[str, Any] | None, lang: str) -> str:
    message = describe(code).message(lang)
    try:
        return render_template(ERROR_TEMPLATE, code=code, status=status, message=message, details=details or {})
    except TemplateNotFound:
        return f"<!doctype html><html lang={lang}><title>{code}</title><h1>{status}</h1><p>{message}</p></html>"
