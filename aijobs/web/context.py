"""What views read from the application and the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from flask import current_app, has_request_context, request, session

from aijobs.texts import clean_line

if TYPE_CHECKING:
    from aijobs.wiring.services import Services

LANGUAGES = ("en", "zh")
API_PREFIXES = ("/api/", "/admin-api/", "/internal/")
_EXTENSION = "aijobs"


def services() -> Services:
    """Return the services of this application."""
    return cast("Services", current_app.extensions[_EXTENSION])


def is_api_request() -> bool:
    """Return whether this request is answered in JSON, errors included."""
    return request.path.startswith(API_PREFIXES) or request.path in ("/healthz", "/readyz")


def language() -> str:
    """Return `en` or `zh`: in the console the operator's choice, otherwise by `Accept-Language`; English by default."""
    if not has_request_context():
        return LANGUAGES[0]
    if not is_api_request() and session.get("language") in LANGUAGES:
        return str(session["language"])
    for tag, quality in request.accept_languages:  # The most wanted first; `zh-CN` counts as `zh`.
        word = tag.partition("-")[0].lower()
        if quality > 0 and word in LANGUAGES:
            return word
    return LANGUAGES[0]


def requested_address() -> str:
    """Return path and query of this request, with the application's prefix."""
    return request.root_path + request.full_path.rstrip("?")


def client_address() -> str | None:
    """Return the client's address, cut to the column: a proxy's header may hold anything."""
    return printable(request.remote_addr or "", 64)


def printable(text: str, length: int) -> str | None:
    """Return the printable part of `text`, cut to `length` characters; None if nothing is left."""
    return clean_line(text)[:length] or None
