"""Per-user row lock. Take it first and hold it until commit while counting limits."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.db.statements import insert_if_absent
from aijobs.jobs.models import QuotaUsage


def ensure_user_row(database: Database, clock: Clock, user_id: str) -> None:
    """Insert the user's row in a transaction of its own: two creators that insert and lock it in one would deadlock."""
    with database.read() as session:
        if session.get(QuotaUsage, user_id) is not None:
            return

    database.write(
        lambda session: insert_if_absent(session, QuotaUsage, "user_id", user_id=user_id, created_at=clock.now())
    )


def lock_user_row(session: Session, user_id: str) -> None:
    """Lock the user's row until the end of this transaction, waiting for another that holds it."""
    session.execute(select(QuotaUsage.user_id).where(QuotaUsage.user_id == user_id).with_for_update()).scalar()
