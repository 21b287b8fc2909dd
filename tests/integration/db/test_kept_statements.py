"""Cached statements: each call has its own values, on all three databases."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import bindparam, func, literal, select
from sqlalchemy.orm import Session

from aijobs.db import statements as db_statements
from aijobs.db.statements import KEPT, change_by, insert_if_absent, insert_row, insert_rows, read_rows
from aijobs.jobs.models import AiJob, AiJobArtifact, AiJobEvent, QuotaUsage
from tests.support.jobs import BEGIN, Kit, race

ONE = AiJob.id == bindparam("of_job")


def test_cached_statement_keeps_no_value_of_an_earlier_call(kit: Kit) -> None:
    a, b = kit.new_job().id, kit.new_job().id
    for job_id, code in ((a, "X"), (b, None), (a, "it's \\ 中文")):
        assert kit.database.write(
            lambda s, job_id=job_id, code=code: change_by(s, AiJob, ONE, of={"of_job": job_id}, error_code=code)
        )
    assert (kit.job(a).error_code, kit.job(b).error_code) == ("it's \\ 中文", None)


def test_expression_of_one_call_is_not_reused_by_another(kit: Kit) -> None:
    job_id = kit.new_job().id
    for retries in (3, 5):
        kit.database.write(
            lambda s, n=retries: change_by(s, AiJob, ONE, of={"of_job": job_id}, retry_count=literal(n) + 0)
        )
        assert kit.job(job_id).retry_count == retries
    missed = kit.database.write(
        lambda s: change_by(s, AiJob, ONE, AiJob.retry_count == 3, of={"of_job": job_id}, retry_count=9)
    )
    found = kit.database.write(
        lambda s: change_by(s, AiJob, ONE, AiJob.retry_count == 5, of={"of_job": job_id}, retry_count=9)
    )
    assert (missed, found) == (0, 1)


def test_cache_of_statements_is_limited(kit: Kit) -> None:
    job_id = kit.new_job().id
    with kit.database.transaction() as session:
        for n in range(KEPT + 20):
            change_by(session, AiJob, ONE, of={"of_job": job_id}, retry_count=literal(n) + 0)
    assert db_statements._update.cache_info().currsize <= KEPT
    assert kit.job(job_id).retry_count == KEPT + 19


def test_threads_share_cached_statements_but_not_values(kit: Kit) -> None:
    jobs = [kit.new_job().id for _ in range(2)]

    def count_up(job_id: str, first: int) -> None:
        for n in range(first, first + 50):
            kit.database.write(lambda s, n=n: change_by(s, AiJob, ONE, of={"of_job": job_id}, retry_count=n))
            assert kit.job(job_id).retry_count == n

    ended = race(*(lambda job_id=job_id, first=1000 * n: count_up(job_id, first) for n, job_id in enumerate(jobs)))
    assert ended == [None, None]


@pytest.mark.parametrize(
    "write",
    [
        lambda s: change_by(s, AiJob, ONE, of={"of_job": "x"}, locked_bye=None),
        lambda s: insert_row(s, AiJobEvent, job_id="x", seq=1, typo="x"),
        lambda s: insert_rows(s, AiJobArtifact, [{"job_id": "x", "artifact": "x"}]),
        lambda s: insert_if_absent(s, QuotaUsage, "user_id", user_id="x", user="x"),
    ],
)
def test_unknown_column_raises_an_error(sqlite_kit: Kit, write: Callable[[Session], Any]) -> None:
    with pytest.raises(TypeError, match="has no column"):
        sqlite_kit.database.write(write)


def test_pending_objects_are_flushed_before_a_cached_statement(kit: Kit) -> None:
    def work(session: Session) -> int:
        session.add(QuotaUsage(user_id="u", created_at=BEGIN))
        by = QuotaUsage.user_id == bindparam("of_user")
        return change_by(session, QuotaUsage, by, of={"of_user": "u"}, created_at=BEGIN + timedelta(days=1))

    assert kit.database.write(work) == 1


def test_read_session_flushes_nothing(kit: Kit) -> None:
    job_id = kit.new_job().id
    priority = select(AiJob.priority).where(ONE)
    with kit.database.read() as session:
        session.get_one(AiJob, job_id).priority = 7
        assert read_rows(session, priority, {"of_job": job_id}).scalar_one() == 50
    with kit.database.transaction() as session:
        session.get_one(AiJob, job_id).priority = 7
        assert read_rows(session, priority, {"of_job": job_id}).scalar_one() == 7


def test_rows_are_inserted_by_value_and_by_expression(kit: Kit) -> None:
    job_id = kit.new_job().id
    kit.database.write(
        lambda s: insert_row(
            s, AiJobEvent, job_id=job_id, seq=7, type="x", attempt_no=0, actor="worker", at=kit.clock.now()
        )
    )
    rows = [{"job_id": job_id, "artifact_type": "t", "artifact_id": str(n), "ordinal": n} for n in range(3)]
    kit.database.write(lambda s: insert_rows(s, AiJobArtifact, rows))
    kit.database.write(lambda s: insert_rows(s, AiJobArtifact, []))
    for user in ("v", "v", "w"):
        kit.database.write(
            lambda s, user=user: insert_if_absent(s, QuotaUsage, "user_id", user_id=user, created_at=BEGIN)
        )
    with kit.database.read() as session:
        assert session.execute(select(AiJobEvent.at).where(AiJobEvent.seq == 7)).scalar_one() == BEGIN
        assert list(session.execute(select(AiJobArtifact.ordinal).order_by(AiJobArtifact.ordinal)).scalars()) == [
            0,
            1,
            2,
        ]
        known = select(func.count()).where(QuotaUsage.user_id.in_(("v", "w")))
        assert session.execute(known).scalar_one() == 2
