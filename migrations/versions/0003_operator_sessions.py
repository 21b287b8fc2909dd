"""Sessions of operators.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from aijobs.db.database import Key, UtcDateTime

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# Whatever the server's defaults: text that compares byte by byte, in tables that know transactions.
IN_UTF8MB4 = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("charset", "utf8mb4"), ("collate", "utf8mb4_nopad_bin"), ("engine", "InnoDB"))
}


def upgrade() -> None:
    op.create_table(
        "operator_sessions",
        sa.Column("id", Key(36), nullable=False),
        sa.Column("operator_id", Key(36), nullable=False),
        sa.Column("key_hash", Key(64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("seen_at", UtcDateTime(), nullable=False),
        sa.Column("remote_addr", sa.String(length=64), nullable=True),
        sa.Column("user_agent", sa.String(length=300), nullable=True),
        sa.Column("revoked_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(
            ["operator_id"], ["operators.id"], name=op.f("fk_operator_sessions_operator_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operator_sessions")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_operator_sessions_key_hash")),
        **IN_UTF8MB4,
    )
    op.create_index("ix_operator_sessions_created_at", "operator_sessions", ["created_at"])
    op.create_index("ix_operator_sessions_operator_id", "operator_sessions", ["operator_id"])


def downgrade() -> None:
    op.drop_table("operator_sessions")
