"""The console's cookie. Its name differs between installations, because browsers share cookies among a host's ports."""

from __future__ import annotations

import hmac

from flask import Flask, has_request_context, request
from flask.sessions import SecureCookieSessionInterface


def cookie_name(secret_key: str) -> str:
    """Return the cookie's name: the same in all web processes of an installation, which share the secret key."""
    digest = hmac.digest(secret_key.encode(), b"aijobs session cookie", "sha256").hex()
    return f"aijobs_session_{digest[:8]}"


class SessionCookie(SecureCookieSessionInterface):
    """Flask's signed cookie. In production at the root of a host its name begins with `__Host-`: then browsers refuse
    it from another host or over plain HTTP. Below a path prefix it has that path, which `__Host-` forbids.
    """

    def get_cookie_name(self, app: Flask) -> str:
        name = super().get_cookie_name(app)
        return f"__Host-{name}" if self.get_cookie_secure(app) and self.get_cookie_path(app) == "/" else name

    def get_cookie_path(self, app: Flask) -> str:
        return (request.root_path if has_request_context() else "") or super().get_cookie_path(app)
