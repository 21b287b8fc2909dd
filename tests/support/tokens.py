"""A cancellation token that tests set by hand."""

from __future__ import annotations

from collections.abc import Callable

from aijobs.errors import JobError


class HandToken:
    """Cancelled after `looks` looks at it; never, where `looks` is None."""

    def __init__(self, looks: int | None = None) -> None:
        self._left = looks
        self.shown: list[int] = []
        """What `progress` was told."""

    @property
    def cancelled(self) -> bool:
        return self._left is not None and self._left <= 0

    def raise_if_cancelled(self) -> None:
        if self.cancelled:
            raise JobError("CANCELLED", "cancelled by the test")
        if self._left is not None:
            self._left -= 1

    def on_cancel(self, callback: Callable[[], object]) -> None:
        if self.cancelled:
            callback()

    def sleep(self, seconds: float) -> None:
        self.raise_if_cancelled()

    def progress(self, percent: int) -> None:
        self.shown.append(percent)

    def remaining(self) -> float:
        return 0.0 if self.cancelled else 60.0
