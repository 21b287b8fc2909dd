"""Which step answers which call: scripts by API key and model."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from aijobs.testing.fakellm.answer import Step
from aijobs.testing.fakellm.request import CHAT, Request

_Place = tuple[str, str | None, str | None]


class Scripts:
    """Lists of steps; one step a call, the last one again and again. Thread-safe.

    Of several scripts that fit a call the one for its key and model counts, then that for its key, then that for
    its model, then the one for all.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._steps: dict[_Place, list[Step]] = {}

    def set(self, steps: Sequence[Step], key: str | None, model: str | None, kind: str = CHAT) -> None:
        """Begin a new script in the place of the old one; an empty one takes it away."""
        with self._guard:
            if steps:
                self._steps[kind, key, model] = list(steps)
            else:
                self._steps.pop((kind, key, model), None)

    def clear(self) -> None:
        """Take all scripts away."""
        with self._guard:
            self._steps.clear()

    def take(self, request: Request) -> Step | None:
        """The next step for a call; None where no script is for it."""
        return self._find(request, request.kind, take=True)

    def peek(self, request: Request, kind: str = CHAT) -> Step | None:
        """The step that the next call of a kind with this key would get."""
        return self._find(request, kind, take=False)

    def _find(self, request: Request, kind: str, *, take: bool) -> Step | None:
        key, model = request.key, request.model
        with self._guard:
            for place in ((kind, key, model), (kind, key, None), (kind, None, model), (kind, None, None)):
                steps = self._steps.get(place)
                if steps:
                    return steps.pop(0) if take and len(steps) > 1 else steps[0]
        return None
