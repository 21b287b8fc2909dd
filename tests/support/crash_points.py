"""Names of the points around a COMMIT at which chaos tests and the state machine end a process."""

from __future__ import annotations

BEFORE_COMMIT = "before_commit"
"""The transaction has no effect."""
AFTER_COMMIT = "after_commit"
"""The transaction has taken effect; no code after the COMMIT runs."""
