"""An expected end of a command that isn't success: one line on standard error and an exit code."""

from __future__ import annotations

BAD_INPUT = 2
FAILED = 1


class Failure(Exception):
    """`text` in one line; `exit_code` 2 for bad arguments or files, else 1."""

    def __init__(self, text: str, exit_code: int = FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code
