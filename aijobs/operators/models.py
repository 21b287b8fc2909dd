"""The tables of operators, their tokens and sessions, and the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Boolean, ForeignKey, Index, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from aijobs.db.database import TABLE_OPTIONS, Base, Json, Key, UtcDateTime
from aijobs.ids import new_id

VIEWER = "VIEWER"
OPERATOR = "OPERATOR"
SUPER_ADMIN = "SUPER_ADMIN"
ROLES = (VIEWER, OPERATOR, SUPER_ADMIN)


class Operator(Base):
    """A person who signs in to the console."""

    __tablename__ = "operators"

    id: Mapped[str] = mapped_column(Key(36), primary_key=True, default=new_id)
    username: Mapped[str] = mapped_column(Key(100), unique=True)
    password_hash: Mapped[str] = mapped_column(String(255))
    role: Mapped[str] = mapped_column(String(16))
    language: Mapped[str | None] = mapped_column(String(8))
    active: Mapped[bool] = mapped_column(Boolean, default=True)
    session_version: Mapped[int] = mapped_column(Integer, default=1)
    """Raised whenever all sessions are revoked, for web processes of the previous version. A later version drops it."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    last_login_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class OperatorSession(Base):
    """A sign-in of an operator in one browser; only the digest of the key in its cookie is stored."""

    __tablename__ = "operator_sessions"

    id: Mapped[str] = mapped_column(Key(36), primary_key=True, default=new_id)
    operator_id: Mapped[str] = mapped_column(Key(36), ForeignKey("operators.id", ondelete="CASCADE"), index=True)
    key_hash: Mapped[str] = mapped_column(Key(64), unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    seen_at: Mapped[datetime] = mapped_column(UtcDateTime)
    remote_addr: Mapped[str | None] = mapped_column(String(64))
    user_agent: Mapped[str | None] = mapped_column(String(300))
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class OperatorToken(Base):
    """A bearer token of an operator for the admin API; only its digest is stored."""

    __tablename__ = "operator_tokens"

    id: Mapped[str] = mapped_column(Key(36), primary_key=True, default=new_id)
    operator_id: Mapped[str] = mapped_column(Key(36), ForeignKey("operators.id", ondelete="CASCADE"), index=True)
    token_hash: Mapped[str] = mapped_column(Key(64), unique=True)
    label: Mapped[str] = mapped_column(String(100))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class AuditLog(Base):
    """One operator action: who did what to what, why, before and after, when and from where."""

    __tablename__ = "audit_logs"

    id: Mapped[str] = mapped_column(Key(36), primary_key=True, default=new_id)
    operator_id: Mapped[str | None] = mapped_column(Key(36))
    actor: Mapped[str] = mapped_column(String(300))
    action: Mapped[str] = mapped_column(String(64))
    target_type: Mapped[str] = mapped_column(String(32))
    target_id: Mapped[str] = mapped_column(Key(255))
    reason: Mapped[str | None] = mapped_column(String(1000))
    before: Mapped[Any | None] = mapped_column(Json)
    after: Mapped[Any | None] = mapped_column(Json)
    remote_addr: Mapped[str | None] = mapped_column(String(64))
    user_agent: Mapped[str | None] = mapped_column(String(300))
    at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (
        Index("ix_audit_logs_newest", "at", "id"),
        Index("ix_audit_logs_target", "target_type", "target_id", "at"),
        TABLE_OPTIONS,
    )
