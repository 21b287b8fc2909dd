"""The business tables that projectors write."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Index, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from aijobs.db.database import TABLE_OPTIONS, Base, Json, Key, LongText, UtcDateTime
from aijobs.ids import new_id

FLASHCARD_GENERATION = "flashcard_generation"
"""The job type that writes `flashcards`."""


class Flashcard(Base):
    """One card: `basic` with front and back, or `cloze` with a text that holds `{{c1::…}}` gaps.

    Business rows outlive their job, so `job_id` is a plain column.
    """

    __tablename__ = "flashcards"

    id: Mapped[str] = mapped_column(Key(36), primary_key=True, default=new_id)
    user_id: Mapped[str] = mapped_column(Key(255))
    job_id: Mapped[str] = mapped_column(Key(36))
    ordinal: Mapped[int] = mapped_column(Integer)
    card_type: Mapped[str] = mapped_column(String(16))
    front: Mapped[str | None] = mapped_column(LongText)
    back: Mapped[str | None] = mapped_column(LongText)
    text: Mapped[str | None] = mapped_column(LongText)
    hint: Mapped[str | None] = mapped_column(LongText)
    tags: Mapped[Any] = mapped_column(Json, nullable=False)
    difficulty: Mapped[str | None] = mapped_column(String(16))
    evidence: Mapped[Any] = mapped_column(Json, nullable=False)
    lang: Mapped[str] = mapped_column(String(8))
    source_id: Mapped[str] = mapped_column(Key(255))
    source_title: Mapped[str] = mapped_column(String(300))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (
        Index("uq_flashcards_job_ordinal", "job_id", "ordinal", unique=True),
        Index("ix_flashcards_user", "user_id", "created_at", "id"),
        TABLE_OPTIONS,
    )
