"""What a view asks of the application and of the request at hand."""

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
    """The services that this application was made with."""
    return cast("Services", current_app.extensions[_EXTENSION])


def is_api_request() -> bool:
    """Whether this request is answered in JSON, errors included."""
    return request.path.startswith(API_PREFIXES) or request.path in ("/healthz", "/readyz")


def language() -> str:
    """`en` or `zh`: in the console what the operator chose, else by `Accept-Language`; English else."""
    if not has_request_context():
        return LANGUAGES[0]
    if not is_api_request() and session.get("language") in LANGUAGES:
        return str(session["language"])
    for tag, quality in request.accept_languages:  # The most wanted first; `zh-CN` is as good as `zh`.
        word = tag.partition("-")[0].lower()
        if quality > 0 and word in LANGUAGES:
            return word
    return LANGUAGES[0]


def asked_address() -> str:
    """Path and query of this request with the prefix that the application stands under."""
    return request.root_path + request.full_path.rstrip("?")


def client_address() -> str | None:
    """Where the request comes from, as a column can hold it: a proxy's header may say anything."""
    return printable(request.remote_addr or "", 64)


def printable(text: str, length: int) -> str | None:
    """What can be seen of `text`, cut to `length` characters; None if nothing can."""
    return clean_line(text)[:length] or None
