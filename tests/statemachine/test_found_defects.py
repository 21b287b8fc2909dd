"""Defects that the state machine found, each as a minimal test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from aijobs.db.database import Database
from aijobs.jobs.models import AiJobArtifact, QuotaUsage
from tests.support.jobs import BEGIN, prepare_database


def test_connection_returns_to_the_pool_without_open_transaction_after_a_failed_commit(
    create_sqlite_database: Callable[..., str],
) -> None:
    database = Database(create_sqlite_database(prepare_database))

    def fails_at_commit(session: Session) -> None:
        session.execute(text("PRAGMA defer_foreign_keys=ON"))
        session.add(AiJobArtifact(job_id="none", artifact_type="a", artifact_id="b", ordinal=0))

    with pytest.raises(IntegrityError):
        database.write(fails_at_commit)
    database.write(lambda session: session.add(QuotaUsage(user_id="u1", created_at=BEGIN)))
    with database.read() as session:
        assert session.get(QuotaUsage, "u1") is not None
        assert session.execute(text("SELECT count(*) FROM ai_job_artifacts")).scalar_one() == 0
    database.dispose()
