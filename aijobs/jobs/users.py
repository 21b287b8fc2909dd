"""The first row of the lock order: a user's own, which whoever counts what the user has holds until the commit."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.db.statements import insert_if_absent
from aijobs.jobs.models import QuotaUsage


def ensure_user_row(database: Database, clock: Clock, user_id: str) -> None:
    """Make the user's row in a transaction of its own: made and locked in one, two creators would deadlock."""
    with database.read() as session:
        if session.get(QuotaUsage, user_id) is not None:
            return

    database.write(
        lambda session: insert_if_absent(session, QuotaUsage, "user_id", user_id=user_id, created_at=clock.now())
    )


def lock_user_row(session: Session, user_id: str) -> None:
    """Hold the user's row until the end of this transaction; wait for whoever holds it."""
    session.execute(select(QuotaUsage.user_id).where(QuotaUsage.user_id == user_id).with_for_update()).scalar()
