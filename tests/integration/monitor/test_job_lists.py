"""Lists of jobs on each database: complete, exact and cheap."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from aijobs.db.database import Database
from aijobs.errors import ApiError, InputInvalid
from aijobs.ids import new_id
from aijobs.monitor import views
from aijobs.monitor.filters import JobFilter
from aijobs.monitor.monitor import Monitor
from aijobs.monitor.usage_filter import GROUPS, UsageFilter
from tests.support.rows import (
    BEGIN,
    add,
    build_artifacts,
    build_call,
    build_event,
    build_history,
    build_job,
    build_snapshot,
    ended,
    held,
)


def walk(monitor: Monitor, wanted: JobFilter, limit: int) -> list[str]:
    """Return the ids of all pages."""
    found: list[str] = []
    cursor = None
    while True:
        page = monitor.list_jobs(wanted, cursor, limit)
        assert len(page.items) <= limit
        found += [job.id for job in page.items]
        if page.next_cursor is None:
            return found
        cursor = page.next_cursor


def test_pages_show_each_job_once_in_order_if_many_have_the_same_creation_time(
    database: Database, monitor: Monitor
) -> None:
    jobs = [build_job(created_at=BEGIN + timedelta(milliseconds=5 * (n // 40))) for n in range(120)]
    add(database, *jobs)
    expected = [job.id for job in sorted(jobs, key=lambda job: (job.created_at, job.id), reverse=True)]
    assert walk(monitor, JobFilter(), 7) == expected
    assert walk(monitor, JobFilter(), 100) == expected


def test_full_last_page_has_no_next_page(database: Database, monitor: Monitor) -> None:
    add(database, *(build_job() for _ in range(4)))
    page = monitor.list_jobs(JobFilter(), limit=2)
    assert len(monitor.list_jobs(JobFilter(), page.next_cursor, 2).items) == 2
    assert monitor.list_jobs(JobFilter(), page.next_cursor, 2).next_cursor is None


def test_jobs_created_during_paging_do_not_shift_pages(database: Database, monitor: Monitor) -> None:
    jobs = [build_job() for _ in range(6)]
    add(database, *jobs)
    page = monitor.list_jobs(JobFilter(), limit=3)
    add(database, *(build_job(created_at=BEGIN + timedelta(seconds=1)) for _ in range(3)))
    rest = monitor.list_jobs(JobFilter(), page.next_cursor, 100)
    assert [*page.items, *rest.items] == sorted([*page.items, *rest.items], key=lambda job: job.id, reverse=True)
    assert {job.id for job in (*page.items, *rest.items)} == {job.id for job in jobs}


def test_each_filter_returns_matching_jobs_only(database: Database, monitor: Monitor) -> None:
    plain = build_job()
    others = {
        "job_type": build_job(job_type="other_type"),
        "lifecycle_status": build_job(**held()),
        "queue_name": build_job(queue_name="ai-background"),
        "user_id": build_job(user_id="u2"),
        "error_code": build_job(**ended("cancelled", error_code="CANCELLED")),
        "created_from": build_job(created_at=BEGIN + timedelta(hours=1)),
        "created_to": build_job(created_at=BEGIN - timedelta(hours=1)),
        "q": build_job(target_id="target-2"),
        "unresolved": build_job(**ended("failed")),
    }
    add(database, plain, *others.values())
    values: dict[str, Any] = {
        "job_type": "other_type",
        "lifecycle_status": "running",
        "queue_name": "ai-background",
        "user_id": "u2",
        "error_code": "CANCELLED",
        "created_from": BEGIN + timedelta(hours=1),
        "created_to": BEGIN,
        "q": "target-",
        "unresolved": True,
    }
    for name, value in values.items():
        assert walk(monitor, JobFilter(**{name: value}), 50) == [others[name].id], name
    assert walk(monitor, JobFilter(**{**values, "job_type": "none"}), 50) == []


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("Ab", {"Abc"}),
        ("ab", {"abd"}),
        ("a%", {"a%x"}),
        ("a_", {"a_y"}),
        ("é", {"éa"}),
        ("学", {"学生", "学"}),
        ("\U0010ffff", {"\U0010ffffz"}),
        ("a\\", {"a\\b"}),
        ("'", {"'; --"}),
        ("zzz", set()),
    ],
)
def test_prefix_search_is_exact_in_case_accent_and_wildcard(
    database: Database, monitor: Monitor, start: str, found: set[str]
) -> None:
    users = ["Abc", "abd", "a%x", "a_y", "éa", "ea", "学生", "学", "学" * 85, "\U0010ffffz", "a\\b", "'; --"]
    add(database, *(build_job(user_id=user) for user in users))
    seen = {job.user_id for job in monitor.list_jobs(JobFilter(q=start), limit=100).items}
    assert seen == found | ({"学" * 85} if start == "学" else set())


def test_ids_and_users_are_matched_exactly(database: Database, monitor: Monitor) -> None:
    job = build_job(user_id="Müller")
    add(database, job, build_event(job))
    assert monitor.find_job(job.id.upper()) is None
    for other in ("müller", "Muller", "Müller ", "MÜLLER", "Mu\u0308ller"):
        assert monitor.find_own_job(other, job.id) is None
        assert monitor.list_own_jobs(other, JobFilter()).items == ()
    found = monitor.find_own_job("Müller", job.id)
    assert found is not None
    assert found.job.queued_at == BEGIN + timedelta(seconds=2)


def test_filter_of_own_jobs_cannot_select_another_user(database: Database, monitor: Monitor) -> None:
    add(database, build_job(user_id="u2"))
    assert monitor.list_own_jobs("u1", JobFilter(user_id="u2")).items == ()


def test_chain_is_judged_by_its_newest_job(database: Database, monitor: Monitor) -> None:
    first = build_job(**ended("failed"))
    # The second was created on a host whose clock is behind: references decide, not times.
    second = build_job(
        parent_job_id=first.id, root_id=first.id, created_at=BEGIN - timedelta(hours=1), **ended("failed")
    )
    third = build_job(parent_job_id=second.id, root_id=first.id, **ended("succeeded"))
    alone = build_job(**ended("failed"))
    add(database, first, second, third, alone)
    rows = {job.id: job for job in monitor.list_jobs(JobFilter()).items}
    assert [rows[job.id].recovered_by for job in (first, second, third, alone)] == [third.id, third.id, None, None]
    assert rows[first.id].retried_as == second.id
    assert [rows[job.id].retry_refusal for job in (first, third, alone)] == ["superseded", "succeeded", None]
    assert walk(monitor, JobFilter(unresolved=True), 50) == [alone.id]
    links = monitor.get_detail(second.id).chain
    assert [link.id for link in links] == [first.id, second.id, third.id]


def test_counts_stop_at_the_cap(database: Database, monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "CAP", 3)
    add(database, *(build_job() for _ in range(5)), build_job(**held()), build_job(user_id="u2"))
    counts = monitor.count_jobs(JobFilter(user_id="u1", lifecycle_status="failed"))
    assert {status: (count.value, count.capped) for status, count in counts.items()} == {
        "queued": (3, True),
        "running": (1, False),
        "succeeded": (0, False),
        "failed": (0, False),
        "cancelled": (0, False),
    }
    assert str(counts["running"]) == "1"
    assert str(counts["queued"]).endswith("+")


PAYLOADS = ("validated_output", "internal_error_message", "content,", "content ", "payload", "answer_faults")


def test_lists_read_no_payload_and_use_no_offset_or_unlimited_count(
    database: Database, monitor: Monitor, statements: Callable[[], Any]
) -> None:
    jobs = [build_job(**ended("succeeded", artifact_count=1)) for _ in range(3)]
    add(database, *jobs, *(build_snapshot(job, {}) for job in jobs), *(build_event(job) for job in jobs))
    add(database, *(row for job in jobs for row in build_artifacts(job, "f")), build_call(jobs[0]))
    add(database, *build_history(jobs[0], "created"))
    full = JobFilter(
        lifecycle_status="succeeded", user_id="u1", q="u", created_from=BEGIN, created_to=BEGIN + timedelta(days=1)
    )
    asked: list[Callable[[], Any]] = [
        lambda: monitor.list_jobs(full, limit=2),
        lambda: monitor.list_own_jobs("u1", JobFilter(), limit=2),
        lambda: monitor.count_jobs(full),
        lambda: monitor.find_own_job("u1", jobs[0].id),
        lambda: monitor.get_detail(jobs[0].id),
        monitor.queue_statuses,
        monitor.outbox_status,
        lambda: monitor.list_outbox(status="published", limit=2),
        monitor.workers,
        *(lambda by=by: monitor.usage(UsageFilter(BEGIN, BEGIN + timedelta(days=1), "u1", None, by)) for by in GROUPS),
        lambda: monitor.usage(UsageFilter(user_id="u1")),
    ]
    for ask in asked:
        with statements() as seen:
            ask()
        assert 1 <= len(seen) <= 8, seen
        for statement in seen:
            # On SQLite, SQLAlchemy writes every LIMIT with OFFSET 0.
            text = statement.lower().replace("limit ? offset ?", "limit ?")
            assert not [word for word in PAYLOADS if word in text], statement
            assert "offset" not in text
            assert "distinct" not in text
            assert "count(*)" not in text or "limit" in text or "group by" in text, statement


def test_another_users_job_takes_the_same_statements_as_an_unknown_job(
    database: Database, monitor: Monitor, statements: Callable[[], Any]
) -> None:
    job = build_job(user_id="u2")
    add(database, job)
    asked = []
    for job_id in (job.id, new_id()):
        with statements() as seen:
            assert monitor.find_own_job("u1", job_id) is None
        asked.append(seen)
    assert asked[0] == asked[1]
    assert len(asked[0]) == 1


def test_content_is_read_by_reveal_only(database: Database, monitor: Monitor) -> None:
    job = build_job(**ended("failed", internal_error_message="stack", validated_output={"a": [1, None, "é"]}))
    add(database, job, build_snapshot(job, {"text": "note"}))
    assert monitor.get_detail(job.id).internal_error_message is None
    assert monitor.get_detail(job.id, internal=True).internal_error_message == "stack"
    revealed = monitor.reveal(job.id)
    assert revealed.snapshot == {"text": "note"}
    assert revealed.validated_output == {"a": [1, None, "é"]}
    for ask in (monitor.get_detail, monitor.reveal, monitor.get_job):
        for nothing in (new_id(), "\0", "x" * 1000, ""):
            with pytest.raises(ApiError) as refused:
                ask(nothing)
            assert refused.value.code == "JOB_NOT_FOUND"


def test_invalid_cursor_is_refused(monitor: Monitor) -> None:
    for ask in (lambda c: monitor.list_jobs(JobFilter(), c), lambda c: monitor.list_outbox(cursor=c)):
        with pytest.raises(InputInvalid):
            ask("AAAA")
