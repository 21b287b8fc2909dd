"""Shared by all pages: page or fragment, return addresses, navigation, assets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flask import current_app, render_template, request, session, url_for
from flask_babel import gettext
from htmx_flask import HtmxAwareRequest
from werkzeug.exceptions import HTTPException

from aijobs.operators import rights
from aijobs.web.auth import current_operator, require_right
from aijobs.web.console import blueprint
from aijobs.web.context import language, requested_address, services

V = TypeVar("V", bound=Callable[..., Any])

START = "console.jobs"
PAGES = {"console.start"}
"""Endpoints of whole pages. A sign-in or a change of language may lead back to them (see `whole_page`)."""

_NEEDED = {"audit": rights.AUDIT, "usage": rights.VIEW_USAGE}
"""The right for a page of the navigation, if it isn't `view`."""

THEMES = ("auto", "light", "dark")
_LANGUAGE_TAGS = {"en": "en", "zh": "zh-CN"}
_LONGEST_ADDRESS = 2000


def whole_page(rule: str, right: str) -> Callable[[V], V]:
    """Register a view for a whole page, for operators with `right`."""

    def register(view: V) -> V:
        PAGES.add(f"{blueprint.name}.{view.__name__}")
        blueprint.get(rule)(require_right(right)(view))
        return view

    return register


def htmx() -> Any:
    """Return the htmx headers of this request; false if htmx didn't send it."""
    current = request
    return current.htmx if isinstance(current, HtmxAwareRequest) or hasattr(current, "htmx") else False


def wants_fragment() -> bool:
    """Return whether a fragment is requested: never by a boosted link or a restored history entry."""
    headers = htmx()
    return bool(headers) and not headers.boosted and not headers.history_restore_request


def render(page: str, fragment: str, /, **context: Any) -> str:
    """Render the page, or the fragment that it includes."""
    return render_template(fragment if wants_fragment() else page, **context)


def link(endpoint: str, parameters: Mapping[str, Any]) -> str:
    """Return the URL of a page with these parameters."""
    return url_for(endpoint, **dict[str, Any](parameters))


def known_page(address: str | None) -> str:
    """Return `address` if it is a page of this console, by path and query; otherwise the start page.

    Addresses that a browser would normalize (backslashes, tabs, double slashes, another host) are refused.
    """
    start, root = url_for(START), request.root_path
    if not address or len(address) > _LONGEST_ADDRESS or not address.startswith(f"{root}/"):
        return start
    if not address.isascii() or "\\" in address or any(c <= " " or c == "\x7f" for c in address):
        return start
    try:
        parts = urlsplit(address)
        endpoint, _ = current_app.url_map.bind("").match(parts.path.removeprefix(root), method="GET")
    except (ValueError, HTTPException):
        return start
    if parts.scheme or parts.netloc or endpoint not in PAGES:
        return start
    return parts.path + (f"?{parts.query}" if parts.query else "")


@dataclass(frozen=True)
class Poll:
    """What a page polls, and how often (seconds); `every` 0: never, because nothing can change."""

    address: str
    every: int


@dataclass(frozen=True)
class NavigationEntry:
    """A page in the navigation. `key` opens it after g."""

    name: str
    endpoint: str
    key: str
    label: str
    is_current: bool


def navigation() -> list[NavigationEntry]:
    """Return the pages, in the current language."""
    entries = (
        ("jobs", "console.jobs", "j", gettext("Jobs")),
        ("queues", "console.queues", "q", gettext("Queues")),
        ("workers", "console.workers", "w", gettext("Workers")),
        ("outbox", "console.outbox", "o", gettext("Outbox")),
        ("providers", "console.providers", "p", gettext("Providers")),
        ("usage", "console.usage", "u", gettext("Usage")),
        ("audit", "console.audit", "a", gettext("Audit log")),
    )
    operator = current_operator()
    here = request.root_path + request.path
    return [
        NavigationEntry(name, endpoint, key, label, here.startswith(url_for(endpoint)))
        for name, endpoint, key, label in entries
        if operator is not None and operator.may(_NEEDED.get(name, rights.VIEW))
    ]


@cache
def _version(path: Path, _modified: float) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:10]


def asset(name: str) -> str:
    """Return the URL of a static file. It changes with the file, so that no browser keeps an old one."""
    path = Path(current_app.static_folder or "") / name
    return url_for("static", filename=name, v=_version(path, path.stat().st_mtime))


def context() -> dict[str, Any]:
    """Return the names that every template may use."""
    theme = session.get("theme")
    spoken = language()
    here = known_page(requested_address()) if request.method == "GET" else url_for(START)
    return {
        "operator": current_operator(),
        "language": spoken,
        "language_tag": _LANGUAGE_TAGS[spoken],
        "theme": theme if theme in THEMES else "auto",
        "here": here,
        "environment": services().settings.env,
        "navigation": navigation(),
    }
