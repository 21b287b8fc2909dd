"""An expected failure of a command: one line on standard error, and an exit code."""

from __future__ import annotations

BAD_INPUT = 2
FAILED = 1


class Failure(Exception):
    """`text` is one line. `exit_code`: 2 for bad arguments or files, otherwise 1."""

    def __init__(self, text: str, exit_code: int = FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code
