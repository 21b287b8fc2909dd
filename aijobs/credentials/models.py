"""Users' own provider keys, encrypted."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import LargeBinary, String
from sqlalchemy.orm import Mapped, deferred, mapped_column

from aijobs.db.database import Base, Key, UtcDateTime
from aijobs.ids import new_id


class UserModelCredential(Base):
    """A user's own provider key, encrypted. Only its id is on a job."""

    __tablename__ = "user_model_credentials"

    id: Mapped[str] = mapped_column(Key(36), primary_key=True, default=new_id)
    user_id: Mapped[str] = mapped_column(Key(255), index=True)
    mode: Mapped[str] = mapped_column(String(32))
    label: Mapped[str] = mapped_column(String(100))
    last_four: Mapped[str] = mapped_column(String(4))
    fingerprint: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str] = mapped_column(Key(16), index=True)
    """The key of the ring that encrypts it. Indexed, because each start checks which keys are needed."""
    ciphertext: Mapped[bytes] = deferred(mapped_column(LargeBinary, nullable=False), raiseload=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Written once an hour at most."""
