"""Count losses in a shared process apart from charged ones.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The server's default is for rows that are there already, and for web processes of the version before.
    op.add_column("ai_jobs", sa.Column("uncharged_losses", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("ai_jobs", "uncharged_losses")
