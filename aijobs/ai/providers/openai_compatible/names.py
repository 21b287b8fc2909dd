"""Which of a server's words may be told. It may make them from what it was sent: the key, and the learner's notes."""

from __future__ import annotations

import re
from typing import Any

_WORD = re.compile(r"(?=.{1,40}\Z)[a-z]+(?:_[a-z]+)*|\d{1,5}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_SHARED = 8
"""Characters in a row of a key that no name holds by chance."""
OTHER = "other"


def is_word(text: str) -> bool:
    """Whether a code may be told: lower-case words, as `rate_limit_exceeded`. No key and no note looks like that."""
    return _WORD.fullmatch(text) is not None


def reason(told: str) -> str:
    """Why an answer ended: the server's word, or `other`."""
    return told if is_word(told) else OTHER


def name(told: Any, key: str) -> str | None:
    """A server's name for a model or a call; None where it looks like none, or has a piece of the call's key in it."""
    if not isinstance(told, str) or not _NAME.fullmatch(told):
        return None
    pieces = (key[start : start + _SHARED] for start in range(max(1, len(key) - _SHARED + 1)))
    return None if key and any(piece in told for piece in pieces) else told
