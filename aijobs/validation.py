"""What a schema finds wrong with a value, told without the value.

A message goes to logs of operators, to columns and to the next prompt; the value is a learner's text or a model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import ValidationError

Location = tuple[int | str, ...]

_NAME = r"[a-z]+(?:_[a-z]+|[A-Z][a-z]+)*"
_ORDINARY = re.compile(rf"(?=.{{1,40}}\Z){_NAME}")
_ORDINARY_PATH = re.compile(rf"(?=.{{0,200}}\Z)(?:{_NAME})?(?:\.{_NAME}|\[\d{{1,6}}\])*")
ANOTHER_NAME = "(another name)"
"""In the place of a field's name that is none of a programmer's: whoever made the value up chose it."""


def find_schema_faults(error: ValidationError) -> list[tuple[Location, str]]:
    """(location, what is wrong) for each fault. A message quotes nothing of the value, unless a validator's own does; a
    location holds the names of unknown fields as they came.
    """
    found = error.errors(include_url=False, include_input=False)
    return [(each["loc"], _message(each["type"], each["msg"], each.get("ctx", {}))) for each in found]


def _message(kind: str, text: str, context: dict[str, object]) -> str:
    if kind == "union_tag_invalid":  # The one message that holds a part of the value.
        return f"{context['discriminator']} is none of {context['expected_tags']}"
    return text


def plain_location(location: Iterable[int | str]) -> str:
    """A location with dots, names that no programmer would give left out."""
    parts = (str(part) if isinstance(part, int) or _ORDINARY.fullmatch(part) else ANOTHER_NAME for part in location)
    return ".".join(parts)


def plain_path(path: str) -> str:
    """A path such as `cards[0].front` as it is, or `(another name)` where a name in it is none of a programmer's."""
    return path if _ORDINARY_PATH.fullmatch(path) else ANOTHER_NAME
