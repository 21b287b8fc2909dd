"""The rights of each role."""

from __future__ import annotations

from aijobs.operators.models import OPERATOR, SUPER_ADMIN, VIEWER

VIEW = "view"
VIEW_USAGE = "view_usage"
REVEAL = "reveal"
RETRY = "retry"
CANCEL = "cancel"
BULK = "bulk"
QUEUE_PAUSE = "queue_pause"
OUTBOX_FIX = "outbox_fix"
PROVIDER_FIX = "provider_fix"
OPERATORS = "operators"
AUDIT = "audit"
INTERNAL_ERRORS = "internal_errors"

RIGHTS = (
    VIEW,
    VIEW_USAGE,
    REVEAL,
    RETRY,
    CANCEL,
    BULK,
    QUEUE_PAUSE,
    OUTBOX_FIX,
    PROVIDER_FIX,
    OPERATORS,
    AUDIT,
    INTERNAL_ERRORS,
)

RIGHTS_OF: dict[str, frozenset[str]] = {
    VIEWER: frozenset({VIEW}),
    OPERATOR: frozenset({VIEW, VIEW_USAGE, RETRY, CANCEL, BULK, QUEUE_PAUSE, OUTBOX_FIX, PROVIDER_FIX}),
    SUPER_ADMIN: frozenset(RIGHTS),
}


def may(role: str, right: str) -> bool:
    """Return whether `role` has `right`. An unknown role has none."""
    return right in RIGHTS_OF.get(role, frozenset())
