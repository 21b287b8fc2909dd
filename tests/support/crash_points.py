"""Where a process may end around a COMMIT: the words of chaos, which ends real processes, and of the state machine."""

from __future__ import annotations

BEFORE_COMMIT = "before_commit"
"""Nothing of the transaction takes effect."""
AFTER_COMMIT = "after_commit"
"""All of it does, and nothing that was to follow it."""
