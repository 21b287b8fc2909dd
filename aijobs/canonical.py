"""Canonical JSON (RFC 8785), its hash, our names in it, and the limits of JSON values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import rfc8785

MAX_INTEGER = 2**53 - 1
"""Larger JSON numbers lose digits between systems (RFC 8785 refuses them)."""

MAX_DEPTH = 30
"""Maximum levels of objects and lists. MariaDB takes less than 32."""

IDENTIFIERS = frozenset({"id", "sid"})
"""Fields of inputs and outputs with the learning app's own ids."""


def canonical_bytes(value: Any) -> bytes:
    """Return `value` as canonical JSON. `ValueError` for the faults of `find_faults`."""
    return rfc8785.dumps(value)


def canonical_hash(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of `value`, as 64 hex digits."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


def json_name(name: str) -> str:
    """Return one of our names in JSON's form: `jobType` for `job_type`."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def find_faults(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (field path, fault) for each part of a JSON value that not all databases can store or hash alike."""
    if isinstance(value, str):
        if fault := text_fault(value):
            yield path, fault
    elif depth >= MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        yield path, f"is nested deeper than {MAX_DEPTH} levels"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if fault := text_fault(key):
                yield path, f"has a key that {fault}"
                continue
            yield from find_faults(inner, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from find_faults(inner, f"{path}[{index}]", depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
        yield path, f"is beyond ±{MAX_INTEGER}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, "is not a finite number"


def text_fault(text: str) -> str | None:
    """Return why a text can't be stored, or None: NUL and lone surrogates are refused."""
    if "\x00" in text:
        return "holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds a lone surrogate"
    return None


def identifier_fault(text: str) -> str | None:
    """Return why a text can't be an identifier (user id, idempotency key, target id), or None."""
    if not 1 <= len(text) <= 255:
        return "has 1–255 characters"
    if fault := text_fault(text):
        return fault
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text):
        return "holds a control character"
    if text != text.strip():
        return "has a space at one end"
    return None
