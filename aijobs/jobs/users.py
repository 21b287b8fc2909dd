"""Per-user row lock. Take it first and hold it until commit while counting limits."""

from __future__ import annotations

from sqlalchemy import bindparam, select

from aijobs.db.clock import Clock
from aijobs.db.database import Database, Unit
from aijobs.db.statements import insert_if_absent, read_rows
from aijobs.jobs.models import QuotaUsage


def ensure_user_row(database: Database, clock: Clock, user_id: str) -> None:
    """Insert the user's row in a transaction of its own: two creators that insert and lock it in one would deadlock."""
    with database.read() as session:
        if session.get(QuotaUsage, user_id) is not None:
            return

    database.write(
        lambda session: insert_if_absent(session, QuotaUsage, "user_id", user_id=user_id, created_at=clock.now())
    )


_LOCK = select(QuotaUsage.user_id).where(QuotaUsage.user_id == bindparam("of_user")).with_for_update()


def lock_user_row(unit: Unit, user_id: str) -> bool:
    """Lock the user's row until the end of this transaction, and wait for another holder. Return whether it exists."""
    return read_rows(unit, _LOCK, {"of_user": user_id}).scalar() is not None
