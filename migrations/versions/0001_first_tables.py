"""First tables.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from aijobs.db.database import Json, Key, LongText, UtcDateTime

revision = "0001"
down_revision = None
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
        "audit_logs",
        sa.Column("id", Key(36), nullable=False),
        sa.Column("operator_id", Key(36), nullable=True),
        sa.Column("actor", sa.String(length=300), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target_type", sa.String(length=32), nullable=False),
        sa.Column("target_id", Key(255), nullable=False),
        sa.Column("reason", sa.String(length=1000), nullable=True),
        sa.Column("before", Json, nullable=True),
        sa.Column("after", Json, nullable=True),
        sa.Column("remote_addr", sa.String(length=64), nullable=True),
        sa.Column("user_agent", sa.String(length=300), nullable=True),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_logs")),
        **IN_UTF8MB4,
    )
    op.create_index("ix_audit_logs_newest", "audit_logs", ["at", "id"])
    op.create_index("ix_audit_logs_target", "audit_logs", ["target_type", "target_id", "at"])

    op.create_table(
        "flashcards",
        sa.Column("id", Key(36), nullable=False),
        sa.Column("user_id", Key(255), nullable=False),
        sa.Column("job_id", Key(36), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("card_type", sa.String(length=16), nullable=False),
        sa.Column("front", LongText, nullable=True),
        sa.Column("back", LongText, nullable=True),
        sa.Column("text", LongText, nullable=True),
        sa.Column("hint", LongText, nullable=True),
        sa.Column("tags", Json, nullable=False),
        sa.Column("difficulty", sa.String(length=16), nullable=True),
        sa.Column("evidence", Json, nullable=False),
        sa.Column("lang", sa.String(length=8), nullable=False),
        sa.Column("source_id", Key(255), nullable=False),
        sa.Column("source_title", sa.String(length=300), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_flashcards")),
        **IN_UTF8MB4,
    )
    op.create_index("ix_flashcards_user", "flashcards", ["user_id", "created_at", "id"])
    op.create_index("uq_flashcards_job_ordinal", "flashcards", ["job_id", "ordinal"], unique=True)

    op.create_table(
        "job_tombstones",
        sa.Column("job_id", Key(36), nullable=False),
        sa.Column("user_id", Key(255), nullable=False),
        sa.Column("job_type", Key(64), nullable=False),
        sa.Column("idempotency_key", Key(255), nullable=False),
        sa.Column("request_hash", Key(96), nullable=False),
        sa.Column("deleted_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_job_tombstones")),
        **IN_UTF8MB4,
    )
    op.create_index(op.f("ix_job_tombstones_deleted_at"), "job_tombstones", ["deleted_at"])
    op.create_index(
        "uq_job_tombstones_user_type_key", "job_tombstones", ["user_id", "job_type", "idempotency_key"], unique=True
    )

    op.create_table(
        "operators",
        sa.Column("id", Key(36), nullable=False),
        sa.Column("username", Key(100), nullable=False),
        sa.Column("password_hash", sa.String(length=255), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("language", sa.String(length=8), nullable=True),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("session_version", sa.Integer(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("last_login_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operators")),
        sa.UniqueConstraint("username", name=op.f("uq_operators_username")),
        **IN_UTF8MB4,
    )
    op.create_table(
        "outbox_events",
        sa.Column("id", Key(36), nullable=False),
        sa.Column("event_type", Key(64), nullable=False),
        sa.Column("aggregate_type", sa.String(length=32), nullable=False),
        sa.Column("aggregate_id", Key(36), nullable=False),
        sa.Column("dedupe_key", Key(700), nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("queue_name", Key(32), nullable=True),
        sa.Column("status", Key(16), nullable=False),
        sa.Column("attempt_count", sa.SmallInteger(), nullable=False),
        sa.Column("available_at", UtcDateTime(), nullable=False),
        sa.Column("locked_by", Key(255), nullable=True),
        sa.Column("locked_at", UtcDateTime(), nullable=True),
        sa.Column("published_at", UtcDateTime(), nullable=True),
        sa.Column("last_sent_at", UtcDateTime(), nullable=True),
        sa.Column("redrives", sa.Integer(), nullable=False),
        sa.Column("message_version", sa.SmallInteger(), nullable=False),
        sa.Column("message_key_id", sa.String(length=16), nullable=False),
        sa.Column("last_error", sa.String(length=300), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox_events")),
        sa.UniqueConstraint("dedupe_key", name=op.f("uq_outbox_events_dedupe_key")),
        **IN_UTF8MB4,
    )
    op.create_index("ix_outbox_events_claims", "outbox_events", ["status", "locked_at", "id"])
    op.create_index("ix_outbox_events_due", "outbox_events", ["status", "available_at", "id"])
    op.create_index("ix_outbox_events_job", "outbox_events", ["aggregate_id", "event_type", "id"])
    op.create_index("ix_outbox_events_errors", "outbox_events", ["last_error", "id"])

    op.create_table(
        "pass_runs",
        sa.Column("name", Key(40), nullable=False),
        sa.Column("period_ms", sa.Integer(), nullable=False),
        sa.Column("succeeded_at", UtcDateTime(), nullable=True),
        sa.Column("failed_at", UtcDateTime(), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("error", sa.String(length=100), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_pass_runs")),
        **IN_UTF8MB4,
    )
    op.create_table(
        "queue_pauses",
        sa.Column("queue_name", Key(32), nullable=False),
        sa.Column("reason", sa.String(length=500), nullable=False),
        sa.Column("paused_by", sa.String(length=300), nullable=False),
        sa.Column("paused_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("queue_name", name=op.f("pk_queue_pauses")),
        **IN_UTF8MB4,
    )
    op.create_table(
        "quota_usage",
        sa.Column("user_id", Key(255), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", name=op.f("pk_quota_usage")),
        **IN_UTF8MB4,
    )
    op.create_table(
        "user_model_credentials",
        sa.Column("id", Key(36), nullable=False),
        sa.Column("user_id", Key(255), nullable=False),
        sa.Column("mode", sa.String(length=32), nullable=False),
        sa.Column("label", sa.String(length=100), nullable=False),
        sa.Column("last_four", sa.String(length=4), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("key_id", Key(16), nullable=False),
        sa.Column("ciphertext", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("last_used_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_user_model_credentials")),
        **IN_UTF8MB4,
    )
    op.create_index(op.f("ix_user_model_credentials_key_id"), "user_model_credentials", ["key_id"])
    op.create_index(op.f("ix_user_model_credentials_user_id"), "user_model_credentials", ["user_id"])

    op.create_table(
        "ai_jobs",
        sa.Column("id", Key(36), nullable=False),
        sa.Column("user_id", Key(255), nullable=False),
        sa.Column("job_type", Key(64), nullable=False),
        sa.Column("target_type", Key(64), nullable=False),
        sa.Column("target_id", Key(255), nullable=False),
        sa.Column("queue_name", Key(32), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("lifecycle_status", Key(16), nullable=False),
        sa.Column(
            "status",
            sa.String(length=16),
            sa.Computed(
                "CASE WHEN lifecycle_status = 'queued' THEN 'pending' WHEN lifecycle_status = 'running' AND cancel_requested_at IS NOT NULL THEN 'cancel_requested' WHEN lifecycle_status = 'running' THEN 'processing' WHEN lifecycle_status = 'succeeded' THEN 'completed' ELSE lifecycle_status END",
                persisted=True,
            ),
            nullable=True,
        ),
        sa.Column("progress", sa.SmallInteger(), nullable=False),
        sa.Column("idempotency_key", Key(255), nullable=True),
        sa.Column("request_hash", Key(96), nullable=True),
        sa.Column("event_seq", sa.Integer(), nullable=False),
        sa.Column("input_schema_version", sa.String(length=32), nullable=False),
        sa.Column("output_schema_version", sa.String(length=32), nullable=False),
        sa.Column("prompt_version", sa.String(length=32), nullable=True),
        sa.Column("credential_mode", sa.String(length=32), nullable=False),
        sa.Column("credential_id", Key(36), nullable=True),
        sa.Column("trigger_type", sa.String(length=16), nullable=False),
        sa.Column("parent_job_id", Key(36), nullable=True),
        sa.Column("root_id", Key(36), nullable=False),
        sa.Column("retry_count", sa.Integer(), nullable=False),
        sa.Column("lost_count", sa.Integer(), nullable=False),
        sa.Column("max_retry_count", sa.Integer(), nullable=False),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("locked_by", Key(255), nullable=True),
        sa.Column("locked_at", UtcDateTime(), nullable=True),
        sa.Column("lock_until", UtcDateTime(), nullable=True),
        sa.Column("next_attempt_at", UtcDateTime(), nullable=True),
        sa.Column("cancel_requested_at", UtcDateTime(), nullable=True),
        sa.Column("cancel_requested_by", sa.String(length=300), nullable=True),
        sa.Column("validated_output", Json, nullable=True),
        sa.Column("output_hash", sa.String(length=64), nullable=True),
        sa.Column("answer_faults", Json, nullable=True),
        sa.Column("artifact_count", sa.Integer(), nullable=False),
        sa.Column("error_code", Key(64), nullable=True),
        sa.Column("public_error_message", sa.String(length=500), nullable=True),
        sa.Column("internal_error_message", LongText, nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=True),
        sa.Column("finished_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint(
            "lifecycle_status IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')",
            name=op.f("ck_ai_jobs_lifecycle_status"),
        ),
        sa.CheckConstraint("progress BETWEEN 0 AND 100", name=op.f("ck_ai_jobs_progress")),
        sa.ForeignKeyConstraint(
            ["credential_id"], ["user_model_credentials.id"], name=op.f("fk_ai_jobs_credential_id"), ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ai_jobs")),
        sa.UniqueConstraint("parent_job_id", name=op.f("uq_ai_jobs_parent_job_id")),
        **IN_UTF8MB4,
    )
    op.create_index(op.f("ix_ai_jobs_credential_id"), "ai_jobs", ["credential_id"])
    op.create_index("ix_ai_jobs_due", "ai_jobs", ["queue_name", "lifecycle_status", "next_attempt_at"])
    op.create_index("ix_ai_jobs_ended", "ai_jobs", ["lifecycle_status", "finished_at", "id"])
    op.create_index("ix_ai_jobs_error_newest", "ai_jobs", ["error_code", "created_at", "id"])
    op.create_index("ix_ai_jobs_holders", "ai_jobs", ["locked_by"])
    op.create_index("ix_ai_jobs_leases", "ai_jobs", ["lifecycle_status", "lock_until", "id"])
    op.create_index("ix_ai_jobs_newest", "ai_jobs", ["created_at", "id"])
    op.create_index("ix_ai_jobs_queue_newest", "ai_jobs", ["queue_name", "created_at", "id"])
    op.create_index(op.f("ix_ai_jobs_root_id"), "ai_jobs", ["root_id"])
    op.create_index("ix_ai_jobs_status_newest", "ai_jobs", ["lifecycle_status", "created_at", "id"])
    op.create_index("ix_ai_jobs_target", "ai_jobs", ["target_id"])
    op.create_index(
        "ix_ai_jobs_turns",
        "ai_jobs",
        ["queue_name", "lifecycle_status", "locked_by", "user_id", "priority", "id"],
    )
    op.create_index("ix_ai_jobs_type_newest", "ai_jobs", ["job_type", "created_at", "id"])
    op.create_index("ix_ai_jobs_user_newest", "ai_jobs", ["user_id", "created_at", "id"])
    op.create_index("ix_ai_jobs_user_status", "ai_jobs", ["user_id", "lifecycle_status", "id"])
    op.create_index("uq_ai_jobs_user_type_key", "ai_jobs", ["user_id", "job_type", "idempotency_key"], unique=True)

    op.create_table(
        "operator_tokens",
        sa.Column("id", Key(36), nullable=False),
        sa.Column("operator_id", Key(36), nullable=False),
        sa.Column("token_hash", Key(64), nullable=False),
        sa.Column("label", sa.String(length=100), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=True),
        sa.Column("last_used_at", UtcDateTime(), nullable=True),
        sa.Column("revoked_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(
            ["operator_id"], ["operators.id"], name=op.f("fk_operator_tokens_operator_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operator_tokens")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_operator_tokens_token_hash")),
        **IN_UTF8MB4,
    )
    op.create_index(op.f("ix_operator_tokens_operator_id"), "operator_tokens", ["operator_id"])

    op.create_table(
        "ai_job_artifacts",
        sa.Column("job_id", Key(36), nullable=False),
        sa.Column("artifact_type", Key(64), nullable=False),
        sa.Column("artifact_id", Key(64), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["ai_jobs.id"], name=op.f("fk_ai_job_artifacts_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "artifact_type", "artifact_id", name=op.f("pk_ai_job_artifacts")),
        **IN_UTF8MB4,
    )
    op.create_table(
        "ai_job_events",
        sa.Column("job_id", Key(36), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("type", sa.String(length=24), nullable=False),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("actor", sa.String(length=300), nullable=False),
        sa.Column("instance", sa.String(length=255), nullable=True),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=True),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["ai_jobs.id"], name=op.f("fk_ai_job_events_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_ai_job_events")),
        **IN_UTF8MB4,
    )
    op.create_table(
        "ai_job_snapshots",
        sa.Column("job_id", Key(36), nullable=False),
        sa.Column("schema_version", sa.String(length=32), nullable=False),
        sa.Column("content", Json, nullable=False),
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("content_bytes", sa.BigInteger(), nullable=False),
        sa.Column("redaction_version", sa.String(length=16), nullable=False),
        sa.Column("redaction_counts", Json, nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["ai_jobs.id"], name=op.f("fk_ai_job_snapshots_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_ai_job_snapshots")),
        **IN_UTF8MB4,
    )
    op.create_index(op.f("ix_ai_job_snapshots_expires_at"), "ai_job_snapshots", ["expires_at"])

    op.create_table(
        "quota_reservations",
        sa.Column("job_id", Key(36), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_micros", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["ai_jobs.id"], name=op.f("fk_quota_reservations_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_quota_reservations")),
        **IN_UTF8MB4,
    )
    op.create_table(
        "ai_usage_logs",
        sa.Column("id", Key(36), nullable=False),
        sa.Column("job_id", Key(36), nullable=False),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("call_no", sa.SmallInteger(), nullable=False),
        sa.Column("user_id", Key(255), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("credential_mode", sa.String(length=32), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.Column("cached_tokens", sa.Integer(), nullable=True),
        sa.Column("estimated", sa.Boolean(), nullable=False),
        sa.Column("cost_micros", sa.BigInteger(), nullable=True),
        sa.Column("currency", sa.String(length=3), nullable=True),
        sa.Column("price_version", sa.String(length=32), nullable=True),
        sa.Column("billed", sa.String(length=8), nullable=False),
        sa.Column("latency_ms", sa.BigInteger(), nullable=True),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("http_status", sa.SmallInteger(), nullable=True),
        sa.Column("request_id", sa.String(length=128), nullable=True),
        sa.Column("started_at", UtcDateTime(), nullable=False),
        sa.Column("finished_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["ai_jobs.id"], name=op.f("fk_ai_usage_logs_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ai_usage_logs")),
        **IN_UTF8MB4,
    )
    op.create_index("ix_ai_usage_logs_started", "ai_usage_logs", ["started_at"])
    op.create_index("ix_ai_usage_logs_state", "ai_usage_logs", ["state", "started_at"])
    op.create_index("ix_ai_usage_logs_user", "ai_usage_logs", ["user_id", "started_at"])
    op.create_index("uq_ai_usage_logs_call", "ai_usage_logs", ["job_id", "attempt_no", "call_no"], unique=True)
    if op.get_context().dialect.name in ("mysql", "mariadb"):
        # Alembic's own table, which it made with the server's defaults.
        op.execute("ALTER TABLE alembic_version CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin")


def downgrade() -> None:
    # Indexes go with their tables; MariaDB lets go of none that a foreign key leans on.
    op.drop_table("ai_usage_logs")
    op.drop_table("quota_reservations")
    op.drop_table("ai_job_snapshots")
    op.drop_table("ai_job_events")
    op.drop_table("ai_job_artifacts")
    op.drop_table("operator_tokens")
    op.drop_table("ai_jobs")
    op.drop_table("user_model_credentials")
    op.drop_table("quota_usage")
    op.drop_table("queue_pauses")
    op.drop_table("pass_runs")
    op.drop_table("outbox_events")
    op.drop_table("operators")
    op.drop_table("job_tombstones")
    op.drop_table("flashcards")
    op.drop_table("audit_logs")
