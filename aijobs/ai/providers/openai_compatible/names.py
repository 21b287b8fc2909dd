"""Which of a server's words may be logged. It may build them from the key and the learner's notes."""

from __future__ import annotations

import re
from typing import Any

_WORD = re.compile(r"(?=.{1,40}\Z)[a-z]+(?:_[a-z]+)*|\d{1,5}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_SHARED = 8
"""Characters in a row that a name and a key don't share by chance."""
OTHER = "other"


def is_word(text: str) -> bool:
    """Return whether a code may be logged: lower-case words, like `rate_limit_exceeded`. No key and no note looks like
    that.
    """
    return _WORD.fullmatch(text) is not None


def reason(told: str) -> str:
    """Return why an answer ended: the server's reason, or `other`."""
    return told if is_word(told) else OTHER


def name(told: Any, key: str) -> str | None:
    """Return a server's name for a model or a call; None if it doesn't look like one, or contains part of the call's
    key.
    """
    if not isinstance(told, str) or not _NAME.fullmatch(told):
        return None
    pieces = (key[start : start + _SHARED] for start in range(max(1, len(key) - _SHARED + 1)))
    return None if key and any(piece in told for piece in pieces) else told
