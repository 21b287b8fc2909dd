"""Keyset pagination: pages that begin after the last row, without OFFSET, with signed cursors.

The last column of the order is unique. A cursor holds the last row's values and an HMAC, so that nobody can have the
database compare made-up values.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, Select, and_, or_

from aijobs.clock import iso, parse_iso
from aijobs.errors import InputInvalid

T = TypeVar("T")

DEFAULT_LIMIT = 50
MAX_LIMIT = 100

_SIGNATURE_BYTES = 16


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some rows and the cursor of the next page (None: there is none)."""

    items: tuple[T, ...]
    next_cursor: str | None


class Cursors:
    """Writes and reads cursors. `scope` names the list (and its owner); a cursor of another list is refused."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.sha256(b"aijobs cursor\0" + secret.encode()).digest()

    def write(self, scope: str, values: Sequence[str | datetime]) -> str:
        """Return the cursor after a row with these values of the ordering columns."""
        parts = [{"t": iso(v)} if isinstance(v, datetime) else v for v in values]
        body = json.dumps(parts, separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._sign(scope, body) + body).rstrip(b"=").decode()

    def read(self, scope: str, cursor: str) -> tuple[Any, ...]:
        """Return the values of `cursor`. `InputInvalid` names `cursor` if it isn't of this list."""
        try:
            raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise InputInvalid([("cursor", "not a cursor of this list")]) from None
        signature, body = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(scope, body)):
            raise InputInvalid([("cursor", "not a cursor of this list")])
        return tuple(parse_iso(v["t"]) if isinstance(v, dict) else v for v in json.loads(body))

    def _sign(self, scope: str, body: bytes) -> bytes:
        return hmac.new(self._key, scope.encode() + b"\0" + body, hashlib.sha256).digest()[:_SIGNATURE_BYTES]


@dataclass(frozen=True)
class Keyset:
    """An order, newest first: `columns` from the most to the least significant, the last one unique."""

    scope: str
    columns: tuple[Any, ...]

    def page(self, query: Select[Any], cursor: str | None, limit: int, cursors: Cursors) -> Select[Any]:
        """Return the rows of `query` in this order, after `cursor`: one more than `limit`, to know whether there are
        more.
        """
        if cursor is not None:
            query = query.where(self._behind(cursors.read(self.scope, cursor)))
        return query.order_by(*(column.desc() for column in self.columns)).limit(limit + 1)

    def cursor(self, last: Sequence[str | datetime], cursors: Cursors) -> str:
        """Return the cursor after a row with these values."""
        return cursors.write(self.scope, last)

    def _behind(self, values: tuple[Any, ...]) -> ColumnElement[bool]:
        """Build the condition for rows after `values`, so that every database starts the range in its index."""
        column, value = self.columns[0], values[0]
        if len(self.columns) == 1:
            return column < value
        rest = Keyset(self.scope, self.columns[1:])._behind(values[1:])
        return and_(column <= value, or_(column < value, rest))
