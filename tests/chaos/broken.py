"""The type of which a verdict is a list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """A promise that was not kept."""

    what: str
    job_ids: tuple[str, ...] = ()
