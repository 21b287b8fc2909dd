"""Read request bodies: any error of the server's reader is the client's fault, and becomes `BAD_REQUEST`."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from werkzeug.wsgi import get_content_length

from aijobs.errors import ApiError

if TYPE_CHECKING:
    from _typeshed.wsgi import InputStream, StartResponse, WSGIApplication, WSGIEnvironment


class CheckedBodies:
    """A WSGI middleware whose `wsgi.input` raises only `BAD_REQUEST`."""

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ["wsgi.input"] = _Body(environ["wsgi.input"], get_content_length(environ))
        return self._app(environ, start_response)


class _Body(io.RawIOBase):
    """A body that raises `ApiError` BAD_REQUEST with a reason: `body_incomplete` if it ends early, `body_malformed` if
    its framing is wrong.

    Servers raise errors of their own: gunicorn's parse errors derive from neither OSError nor ValueError.
    """

    def __init__(self, stream: InputStream, length: int | None) -> None:
        self._stream, self._missing = stream, length or 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        try:
            data = self._stream.read(len(buffer))
        except Exception as error:
            reason = "body_incomplete" if isinstance(error, OSError) else "body_malformed"
            raise ApiError("BAD_REQUEST", {"reason": reason}) from None
        if not data and buffer and self._missing > 0:
            raise ApiError("BAD_REQUEST", {"reason": "body_incomplete"})
        self._missing -= len(data)
        buffer[: len(data)] = data
        return len(data)
