"""Choose the step for a call: scripts by API key and model."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from aijobs.testing.fakellm.answer import Step
from aijobs.testing.fakellm.request import CHAT, Request

_Place = tuple[str, str | None, str | None]


class Scripts:
    """Lists of steps: one step per call, the last one repeated. Thread-safe.

    The most specific script counts: for key and model, for the key, for the model, for all.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._steps: dict[_Place, list[Step]] = {}

    def set(self, steps: Sequence[Step], key: str | None, model: str | None, kind: str = CHAT) -> None:
        """Replace a script; an empty one removes it."""
        with self._guard:
            if steps:
                self._steps[kind, key, model] = list(steps)
            else:
                self._steps.pop((kind, key, model), None)

    def clear(self) -> None:
        """Remove all scripts."""
        with self._guard:
            self._steps.clear()

    def take(self, request: Request) -> Step | None:
        """Return the next step for a call; None without a script."""
        return self._find(request, request.kind, take=True)

    def peek(self, request: Request, kind: str = CHAT) -> Step | None:
        """Return the step for the next call of a kind with this key."""
        return self._find(request, kind, take=False)

    def _find(self, request: Request, kind: str, *, take: bool) -> Step | None:
        key, model = request.key, request.model
        with self._guard:
            for place in ((kind, key, model), (kind, key, None), (kind, None, model), (kind, None, None)):
                steps = self._steps.get(place)
                if steps:
                    return steps.pop(0) if take and len(steps) > 1 else steps[0]
        return None
