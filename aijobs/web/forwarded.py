"""Read a trusted proxy's headers: address, scheme, host and prefix.

The servers are configured to trust no header (`aijobs.web.server`, `aijobs.web.local_server`), so
`AIJOBS_TRUSTED_PROXIES` alone decides. An invalid value is ignored: then the connection's own value counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import unquote

from werkzeug.middleware.proxy_fix import ProxyFix

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_WITH_PORT = re.compile(r"\[([^\]]*)\](?::\d{1,5})?|([^:]*):\d{1,5}")
_PREFIX = re.compile(r"(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~-]+)*")


class Forwarded:
    """A WSGI middleware for an application behind `proxies` reverse proxies. With 0 no `X-Forwarded-…` header
    is read.
    """

    def __init__(self, app: WSGIApplication, proxies: int) -> None:
        self._app, n = app, proxies
        self._fixed = ProxyFix(self._checked, x_for=n, x_proto=n, x_host=n, x_prefix=n)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return self._fixed(environ, start_response)

    def _checked(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        own = environ["werkzeug.proxy_fix.orig"]
        addresses = (environ.get("REMOTE_ADDR"), own["REMOTE_ADDR"])
        environ["REMOTE_ADDR"] = next((found for text in addresses if (found := clean_address(text or ""))), "")
        scheme = environ["wsgi.url_scheme"].lower()
        environ["wsgi.url_scheme"] = scheme if scheme in ("http", "https") else own["wsgi.url_scheme"]
        prefix = environ.get("SCRIPT_NAME", "").rstrip("/")
        environ["SCRIPT_NAME"] = prefix if _PREFIX.fullmatch(prefix) else own["SCRIPT_NAME"] or ""
        # The prefix alone is the start page: the router would redirect, to whatever host the request names. It would
        # also take `//internal/…` for `/internal/…`, which a proxy in front may keep to itself. No route begins with
        # `/./`, so the application answers 404, with its own page, headers and log line.
        path = environ.get("PATH_INFO") or "/"
        doubled = path.startswith("//") or _was_doubled(environ, f"{own['SCRIPT_NAME'] or ''}{path}")
        environ["PATH_INFO"] = f"/.{path}" if doubled else path
        return self._app(environ, start_response)


def _was_doubled(environ: WSGIEnvironment, path: str) -> bool:
    """Return whether `path` began with two slashes or more in the request; waitress leaves one."""
    sent = environ.get("REQUEST_URI", "").partition("?")[0].partition("#")[0]
    return unquote(sent, "latin-1").endswith(f"/{path}")


def clean_address(text: str) -> str | None:
    """Return an IP address without port, brackets and zone, an IPv4 address in IPv6 as IPv4; None if `text` is no
    address.
    """
    found = _WITH_PORT.fullmatch(text.strip())
    bare = (found[1] or found[2] or "") if found else text.strip()
    try:
        address = ip_address(bare.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
