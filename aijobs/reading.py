"""Read JSON from places where others may write, such as Redis: a value that isn't ours reads as absent."""

from __future__ import annotations

from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from aijobs.logs import Sparing, get_logger

T = TypeVar("T")

logger = get_logger(__name__)
_sparing = Sparing()


def read_json(kind: str, text: str | bytes, shape: TypeAdapter[T]) -> T | None:
    """Return the value of `text` in strict mode; None, with one warning a minute per kind, if it has another shape.

    The shape limits every number and length, so that an invalid value doesn't fail later.
    """
    try:
        return shape.validate_json(text, strict=True)
    except ValidationError:
        warn_unreadable(kind)
        return None


def warn_unreadable(kind: str) -> None:
    """Log once a minute that a value of this kind isn't ours."""
    if (held_back := _sparing.may_say(kind)) is not None:
        logger.warning("stored.unreadable", kind=kind, alsoUnreadable=held_back)
