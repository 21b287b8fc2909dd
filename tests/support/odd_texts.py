"""Texts that databases treat differently, as bytes of a request."""

from __future__ import annotations

ODD_TEXTS = {
    "NUL": b"\0",
    "NUL within": b"a\0b",
    "half a pair": b"\xed\xa0\x80",
    "not UTF-8": b"\xff\xfe",
    "the last code point": b"\xf4\x8f\xbf\xbf",
    "a control character": b"\x85\x07",
    "long": b"x" * 3000,
    "long and wide": "💡".encode() * 300,
    "a quote": b"'\"\\%_;--",
    "the first day": b"0001-01-01T00:00:00+14:00",
    "the last day": b"9999-12-31T23:59:59-14:00",
    "a long number": b"9" * 400,
}
