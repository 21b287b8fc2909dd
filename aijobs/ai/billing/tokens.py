"""How many tokens a text comes to, estimated without a tokenizer: for reservations, and for calls that were cut off."""

from __future__ import annotations

import re
from typing import Any

MAX_TOKENS = 2**31 - 1
"""What a column of the ledger holds, and more than any model reads."""

_WIDE = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U0001f000-\U0003ffff]+"
)
"""Chinese, Japanese and Korean signs with their full-width marks, and emoji."""

_WIDE_RATE, _ASCII_RATE, _OTHER_RATE = 14, 5, 10
"""Twentieths of a token a character: 0.7 for a wide one, a quarter for ASCII, and a half for what is written in other
alphabets or with accents, which tokenizers that were trained on English cut finer."""


def estimate_tokens(text: str) -> int:
    """About how many tokens `text` is to a provider, rounded up; 0 for no text.

    Right to a third or so for prose, and never dear to ask: it reads the text twice, in C. Who keeps such a number
    marks it as estimated.
    """
    narrow = _WIDE.sub("", text)
    ascii_ones = len(narrow.encode("ascii", "ignore"))
    wide, other = len(text) - len(narrow), len(narrow) - ascii_ones
    return -(-(wide * _WIDE_RATE + ascii_ones * _ASCII_RATE + other * _OTHER_RATE) // 20)


def read_count(told: Any) -> int | None:
    """Return a token count as a provider told it, or None if it can't be one: `true`, 1.0, "1", below 0, huge."""
    is_count = isinstance(told, int) and not isinstance(told, bool) and 0 <= told <= MAX_TOKENS
    return told if is_count else None
