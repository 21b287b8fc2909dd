"""The index of the fairness rule leaves out held jobs.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_NAME, _TABLE = "ix_ai_jobs_turns", "ai_jobs"


def upgrade() -> None:
    op.drop_index(_NAME, _TABLE)
    op.create_index(_NAME, _TABLE, ["queue_name", "lifecycle_status", "locked_by", "user_id", "priority", "id"])


def downgrade() -> None:
    op.drop_index(_NAME, _TABLE)
    op.create_index(_NAME, _TABLE, ["queue_name", "lifecycle_status", "user_id", "priority", "id"])
