"""CSRF protection: a request that changes something comes from a page of this console and carries its
session's token.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from flask import Flask, request
from flask_wtf.csrf import CSRFProtect, validate_csrf
from wtforms.validators import ValidationError

from aijobs.errors import ApiError
from aijobs.web.context import is_api_request, printable

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_PORTS = {"http": 80, "https": 443}

csrf = CSRFProtect()


def init_app(app: Flask) -> None:
    """Check every request to the console that changes something. The APIs check theirs."""
    app.config.setdefault("WTF_CSRF_CHECK_DEFAULT", False)
    app.config.setdefault("WTF_CSRF_TIME_LIMIT", None)  # As long as the session.
    app.config.setdefault("WTF_CSRF_SSL_STRICT", False)  # It requires a Referer, which privacy settings remove.
    csrf.init_app(app)

    @app.before_request
    def protect() -> None:
        if request.method in SAFE_METHODS or is_api_request():
            return
        if (origin := foreign_origin()) is not None:
            raise ApiError("FORBIDDEN", {"reason": "origin", "origin": origin})
        csrf.protect()


def check_csrf_header() -> None:
    """Check a session's write in the admin API: `FORBIDDEN` without the session's token in `X-CSRF-Token`."""
    try:
        validate_csrf(request.headers.get("X-CSRF-Token"))
    except ValidationError:
        raise ApiError("FORBIDDEN", {"reason": "csrf"}) from None


def foreign_origin() -> str | None:
    """Return the origin that sent this request if it isn't this console; None if it is, or if no header says.

    Without any of the three headers the token and the SameSite cookie decide.
    """
    site = request.headers.get("Sec-Fetch-Site", "none")
    if site == "same-origin":  # The browser compared them itself: a proxy may hide our host name and scheme.
        return None
    sender = request.headers.get("Origin") or request.headers.get("Referer")
    if site == "none" and (not sender or _is_ours(sender)):
        return None
    return printable(sender or site, 200) or site


def _is_ours(address: str) -> bool:
    try:
        theirs, ours = urlsplit(address), urlsplit(f"//{request.host}")
        # A proxy that ends TLS may not say so: then both schemes are ours.
        if theirs.scheme not in (("https",) if request.is_secure else _PORTS):
            return False
        port = _PORTS[theirs.scheme]
        return (theirs.hostname, theirs.port or port) == (ours.hostname, ours.port or port)
    except ValueError:
        return False
