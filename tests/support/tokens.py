"""A cancellation token for tests."""

from __future__ import annotations

from collections.abc import Callable

from aijobs.errors import JobError


class HandToken:
    """Is cancelled after `checks` calls of `raise_if_cancelled`; never if `checks` is None."""

    def __init__(self, checks: int | None = None) -> None:
        self._left = checks
        self.shown: list[int] = []
        """The values passed to `progress`."""

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
