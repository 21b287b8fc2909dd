"""The table of provider calls."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Boolean, ForeignKey, Index, Integer, SmallInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from aijobs.db.database import TABLE_OPTIONS, Base, Key, UtcDateTime
from aijobs.ids import new_id


class CallState(StrEnum):
    """The states in `ai_usage_logs.state`."""

    STARTED = "started"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


class AiUsageLog(Base):
    """One provider call of an attempt: opened before the call, closed after it."""

    __tablename__ = "ai_usage_logs"

    id: Mapped[str] = mapped_column(Key(36), primary_key=True, default=new_id)
    job_id: Mapped[str] = mapped_column(Key(36), ForeignKey("ai_jobs.id", ondelete="CASCADE"))
    attempt_no: Mapped[int] = mapped_column(Integer)
    call_no: Mapped[int] = mapped_column(SmallInteger)
    user_id: Mapped[str] = mapped_column(Key(255))
    state: Mapped[str] = mapped_column(String(16))
    provider: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(128))
    credential_mode: Mapped[str] = mapped_column(String(32))
    prompt_tokens: Mapped[int | None] = mapped_column(Integer)
    completion_tokens: Mapped[int | None] = mapped_column(Integer)
    cached_tokens: Mapped[int | None] = mapped_column(Integer)
    estimated: Mapped[bool] = mapped_column(Boolean, default=False)
    cost_micros: Mapped[int | None] = mapped_column(BigInteger)
    """Millionths of `currency`; None if there is no price or no count, never 0 for unknown."""
    currency: Mapped[str | None] = mapped_column(String(3))
    price_version: Mapped[str | None] = mapped_column(String(32))
    billed: Mapped[str] = mapped_column(String(8), default="unknown")
    """yes, no or unknown."""
    latency_ms: Mapped[int | None] = mapped_column(BigInteger)
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    error_code: Mapped[str | None] = mapped_column(String(64))
    http_status: Mapped[int | None] = mapped_column(SmallInteger)
    """The HTTP status of the provider's answer, if there was one."""
    request_id: Mapped[str | None] = mapped_column(String(128))
    """The provider's id of the call, for questions about a bill."""
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)

    __table_args__ = (
        Index("uq_ai_usage_logs_call", "job_id", "attempt_no", "call_no", unique=True),
        Index("ix_ai_usage_logs_user", "user_id", "started_at"),
        Index("ix_ai_usage_logs_started", "started_at"),
        # Running calls, and those that nobody closed.
        Index("ix_ai_usage_logs_state", "state", "started_at"),
        TABLE_OPTIONS,
    )
