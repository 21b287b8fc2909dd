"""Redaction r1: replace personal data and secrets in a JSON document by marks such as `[EMAIL_1]`.

The same value has the same mark within one document; marks are numbered by first occurrence. The value behind a mark is
stored nowhere.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aijobs.canonical import IDENTIFIERS, find_faults
from aijobs.screening.secret_shapes import is_secret_name
from aijobs.screening.sensitive import FINDERS, Finder

VERSION = "r1"
SECRET = "SECRET"  # noqa: S105 - the word of a mark
_KINDS = "|".join(dict.fromkeys([*(kind for kind, _ in FINDERS), SECRET]))
_MARK = re.compile(rf"\[(?P<kind>{_KINDS})_(?P<number>[1-9][0-9]{{0,8}})\]")
_NAME_FIELDS = ("name", "key", "field", "header", "parameter", "param", "k")
_VALUE_FIELDS = ("value", "val", "v", "content")
_MAX_ROUNDS = 10
"""Maximum passes over a text: a redaction may expose what stood beside it. Real texts need far fewer."""


@dataclass(frozen=True)
class Redacted:
    """A redacted document, with the number of replacements by rule, and the version of the rules."""

    content: Any = field(repr=False)
    counts: Mapping[str, int] = field(default_factory=dict)
    """Replacements by kind of mark in lower case: `{"email": 2, "private_key": 1}`. Kinds without any are left out."""
    version: str = VERSION


def redact(content: Any) -> Redacted:
    """Return a copy of `content`, any JSON value, with marks for what the rules find.

    In all strings and names: mail addresses, phone numbers, Chinese resident ids, bank cards, API keys, tokens, private
    keys, credentials in URLs, and values after the name of a secret. Whole values of fields with such a name, at any
    depth, in JSON inside a string, and as `{"name": "password", "value": "x"}`. The learning app's own ids (`id`,
    `sid`) stay, because its evidence names segments by them. Existing marks stay, and no other value gets them, so a
    second redaction changes nothing.
    """
    return _Redaction(content).run()


class _Redaction:
    def __init__(self, content: Any) -> None:
        self._content = content
        self._taken: dict[str, set[int]] = {}
        self._last: dict[str, int] = {}
        self._marks: dict[tuple[str, str], str] = {}
        self._counts: Counter[str] = Counter()

    def run(self) -> Redacted:
        self._reserve(self._content)
        content = self._value(self._content)
        return Redacted(content, dict(sorted(self._counts.items())))

    def _reserve(self, value: Any) -> None:
        """Record the marks that exist already."""
        if isinstance(value, str):
            for mark in _MARK.finditer(value):
                self._taken.setdefault(mark["kind"], set()).add(int(mark["number"]))
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                self._reserve(name)
                self._reserve(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                self._reserve(inner)

    def _mark(self, kind: str, value: str) -> str:
        self._counts[kind.lower()] += 1
        mark = self._marks.get((kind, value))
        if mark is None:
            taken, number = self._taken.get(kind, set()), self._last.get(kind, 0) + 1
            while number in taken:
                number += 1
            self._last[kind] = number
            mark = self._marks[(kind, value)] = f"[{kind}_{number}]"
        return mark

    # --- values --------------------------------------------------------------------------------------------------

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, Mapping):
            return self._object(value)
        if isinstance(value, list | tuple):
            return [self._value(inner) for inner in value]
        return value

    def _object(self, value: Mapping[str, Any]) -> dict[str, Any]:
        named = any(isinstance(said := value.get(name), str) and is_secret_name(said) for name in _NAME_FIELDS)
        made: dict[str, Any] = {}
        for name, inner in value.items():
            if name in IDENTIFIERS and isinstance(inner, str):
                made[name] = inner
                continue
            safe_name = self._name(name, made)
            secret = is_secret_name(name) or (named and name in _VALUE_FIELDS)
            made[safe_name] = self._secret(inner) if secret else self._value(inner)
        return made

    def _name(self, name: str, made: Mapping[str, Any]) -> str:
        safe = self._text(name)
        while safe in made:  # For example two spellings of one address.
            safe += "'"
        return safe

    def _secret(self, value: Any) -> Any:
        """Redact the value of a secret's name: each text of it, and numbers of four digits or more."""
        if isinstance(value, str):
            return value if not value.strip() or _MARK.fullmatch(value) else self._mark(SECRET, value)
        if isinstance(value, Mapping):
            made: dict[str, Any] = {}
            for name, inner in value.items():
                made[self._name(name, made)] = self._secret(inner)
            return made
        if isinstance(value, list | tuple):
            return [self._secret(inner) for inner in value]
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= 1000:
            return self._mark(SECRET, str(value))
        return value

    def _string(self, text: str) -> str:
        document = _read_json(text)
        if document is None:
            return self._text(text)
        before = self._counts.total()
        safe = self._value(document)
        return text if self._counts.total() == before else json.dumps(safe, ensure_ascii=False)

    # --- texts ---------------------------------------------------------------------------------------------------

    def _text(self, text: str) -> str:
        """Redact the pieces between marks, so that no rule reads a mark or matches across one."""
        pieces = _split(text)
        for _ in range(_MAX_ROUNDS):
            before = self._counts.total()
            for kind, find in FINDERS:
                pieces = [part for piece in pieces for part in self._replaced(kind, find, piece)]
            if self._counts.total() == before:
                break
        return "".join(pieces)

    def _replaced(self, kind: str, find: Finder, piece: str) -> list[str]:
        """Divide a piece around the findings, and replace each by a mark."""
        if len(piece) < _SHORTEST or _MARK.fullmatch(piece):
            return [piece]
        parts, end = [], 0
        for finding in find(piece):
            parts += [piece[end : finding.start], self._mark(kind, finding.value)]
            end = finding.end
        return [part for part in (*parts, piece[end:]) if part] if parts else [piece]


_SHORTEST = 4


def _split(text: str) -> list[str]:
    """Divide a text into marks and the pieces between them."""
    pieces, end = [], 0
    for mark in _MARK.finditer(text):
        pieces += [text[end : mark.start()], mark[0]]
        end = mark.end()
    return [piece for piece in (*pieces, text[end:]) if piece]


def _read_json(text: str) -> dict[str, Any] | list[Any] | None:
    """Return the object or list in a text, if we would store it; otherwise None."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict | list) or next(find_faults(document), None) is not None:
        return None
    return document
