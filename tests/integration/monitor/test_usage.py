"""Usage and cost of calls, on each database: exact, by UTC day, unpriced calls apart, and cheap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aijobs.db.database import Database
from aijobs.monitor import usage
from aijobs.monitor.monitor import Monitor
from aijobs.monitor.usage_filter import GROUPS, UsageFilter
from aijobs.monitor.views import CallCost, UsageTotal
from tests.support.rows import BEGIN, add, build_call, build_job, ended

MIDNIGHT = datetime(2026, 3, 2, tzinfo=UTC)
UNPRICED = {"cost_micros": None, "currency": None}
EVER = UsageFilter()


def test_usage_total_has_correct_numbers(database: Database, monitor: Monitor) -> None:
    job = build_job()
    add(
        database,
        job,
        build_call(job, prompt_tokens=100, cached_tokens=90, completion_tokens=10),
        build_call(job, call_no=2, estimated=True, cost_micros=2**40),
        build_call(job, call_no=3, currency="CNY", cost_micros=1),
        build_call(job, call_no=4, **UNPRICED),
        build_call(job, call_no=5, **UNPRICED, state="failed", billed="no", prompt_tokens=None, completion_tokens=None),
        build_call(job, call_no=6, **UNPRICED, state="lost", billed="unknown", prompt_tokens=None),
        build_call(job, call_no=7, **UNPRICED, state="started", billed="unknown", finished_at=None, prompt_tokens=None),
    )
    assert monitor.usage(EVER).total == UsageTotal(
        calls=7,
        failed_calls=2,
        lost_calls=1,
        calls_under_way=1,
        prompt_tokens=100 + 3 * 10,
        completion_tokens=10 + 5 * 5,
        cached_tokens=90,
        costs=(CallCost("CNY", 1), CallCost("USD", 7 + 2**40)),
        unpriced_calls=2,
        estimated_calls=1,
        possibly_billed_calls=1,
    )


def test_usage_numbers_are_integers(database: Database, monitor: Monitor) -> None:
    job = build_job()
    add(database, job, *(build_call(job, call_no=n, cost_micros=1) for n in range(1, 4)))
    found = monitor.usage(EVER)
    for total in (found.total, found.groups[0].total, monitor.get_detail(job.id).chain_total):
        numbers = [getattr(total, f.name) for f in fields(total) if f.name != "costs"]
        assert {type(n) for n in [*numbers, *(cost.cost_micros for cost in total.costs)]} == {int}
        assert total.costs == (CallCost("USD", 3),)


def test_unpriced_calls_have_no_cost_instead_of_zero(database: Database, monitor: Monitor) -> None:
    job = build_job()
    add(database, job, build_call(job, **UNPRICED), build_call(job, call_no=2, **UNPRICED))
    total = monitor.usage(EVER).total
    assert (total.costs, total.unpriced_calls) == ((), 2)
    assert monitor.usage(UsageFilter(user_id="nobody")).total == UsageTotal()


def test_usage_days_are_utc_days_to_the_millisecond(database: Database, monitor: Monitor) -> None:
    job = build_job()
    instants = [MIDNIGHT - timedelta(milliseconds=1), MIDNIGHT, MIDNIGHT + timedelta(hours=23, minutes=59)]
    instants.append(MIDNIGHT + timedelta(days=1))
    add(database, job, *(build_call(job, call_no=n, started_at=at) for n, at in enumerate(instants, start=1)))
    days = monitor.usage(EVER).groups
    assert [(day.day, day.total.calls) for day in days] == [("2026-03-03", 1), ("2026-03-02", 2), ("2026-03-01", 1)]
    one = monitor.usage(UsageFilter(MIDNIGHT, MIDNIGHT + timedelta(days=1)))
    assert [(day.day, day.total.calls) for day in one.groups] == [("2026-03-02", 2)]
    assert one.total.calls == 2


def test_usage_is_grouped_and_filtered(database: Database, monitor: Monitor) -> None:
    mine, theirs = build_job(), build_job(user_id="U1", job_type="other_type")
    add(
        database,
        mine,
        theirs,
        build_call(mine, cost_micros=1),
        build_call(mine, call_no=2, provider="acme", cost_micros=5),
        build_call(theirs, provider="acme", model="n", currency="CNY", cost_micros=9),
        build_call(theirs, call_no=2, provider="acme", model="n", **UNPRICED),
    )

    def calls_by(group_by: str, **narrower: Any) -> list[Any]:
        found = monitor.usage(UsageFilter(group_by=group_by, **narrower))
        assert not found.more
        assert found.total.calls == sum(group.total.calls for group in found.groups)
        names = list(GROUPS[group_by])
        return [(*(getattr(group, name) for name in names), group.total.calls) for group in found.groups]

    assert calls_by("user") == [("U1", 2), ("u1", 2)]
    assert calls_by("jobType") == [("other_type", 2), ("synthetic", 2)]
    assert calls_by("provider") == [("acme", 3), ("local", 1)]
    assert calls_by("model") == [("acme", "n", 2), ("acme", "m", 1), ("local", "m", 1)]
    assert calls_by("model", user_id="u1") == [("acme", "m", 1), ("local", "m", 1)]
    assert calls_by("day", job_type="other_type") == [("2026-03-01", 2)]


@pytest.mark.parametrize("group_by", ["user", "model"])
def test_costliest_groups_are_shown_and_the_total_counts_all(
    database: Database, monitor: Monitor, monkeypatch: pytest.MonkeyPatch, group_by: str
) -> None:
    monkeypatch.setattr(usage, "MOST_GROUPS", 2)
    jobs = [build_job(user_id=f"user-{n}") for n in range(4)]
    calls = [build_call(job, model=f"model-{n}", cost_micros=n) for n, job in enumerate(jobs)]
    add(database, *jobs, *calls, build_call(jobs[3], call_no=2, model="model-3", currency="CNY", cost_micros=1))
    found = monitor.usage(UsageFilter(group_by=group_by))
    assert found.more
    assert [(group.user_id or group.model or "")[-1] for group in found.groups] == ["3", "2"]
    assert found.groups[0].total.costs == (CallCost("CNY", 1), CallCost("USD", 3))
    assert found.total.costs == (CallCost("CNY", 1), CallCost("USD", 6))


def test_job_has_its_own_total_and_that_of_its_chain(database: Database, monitor: Monitor) -> None:
    first = build_job(**ended("failed"))
    second = build_job(parent_job_id=first.id, root_id=first.id, **ended("failed"))
    third = build_job(parent_job_id=second.id, root_id=first.id)
    stranger = build_job()
    add(
        database,
        *(first, second, third, stranger),
        build_call(first, cost_micros=10),
        build_call(first, attempt_no=2, state="lost", billed="unknown", **UNPRICED),
        build_call(second, cost_micros=100),
        build_call(stranger, cost_micros=1000),
    )
    details = {job.id: monitor.get_detail(job.id) for job in (first, second, third)}
    assert {detail.chain_total for detail in details.values()} == {
        UsageTotal(
            calls=3,
            failed_calls=1,
            lost_calls=1,
            prompt_tokens=30,
            completion_tokens=15,
            costs=(CallCost("USD", 110),),
            unpriced_calls=1,
            possibly_billed_calls=1,
        )
    }
    own = [details[job.id].usage_total for job in (first, second, third)]
    assert [(total.calls, total.costs) for total in own] == [
        (2, (CallCost("USD", 10),)),
        (1, (CallCost("USD", 100),)),
        (0, ()),
    ]


PERIOD = {"since": BEGIN, "until": BEGIN + timedelta(days=1)}
SUMS = {
    "a period": lambda monitor, job: monitor.usage(UsageFilter(**PERIOD)),
    "a user": lambda monitor, job: monitor.usage(UsageFilter(user_id="u1")),
    "a user's period": lambda monitor, job: monitor.usage(UsageFilter(**PERIOD, user_id="u1")),
    "a day's users": lambda monitor, job: monitor.usage(UsageFilter(**PERIOD, group_by="user")),
    "a period by job type": lambda monitor, job: monitor.usage(UsageFilter(**PERIOD, group_by="jobType")),
    "a user's work of one type": lambda monitor, job: monitor.usage(
        UsageFilter(**PERIOD, user_id="u1", job_type="synthetic")
    ),
    "a job and its chain": lambda monitor, job: monitor.get_detail(job),
}


@pytest.mark.parametrize("ask", SUMS)
def test_usage_sums_scan_no_table(
    sqlite_database: Database, sqlite_monitor: Monitor, plans: Callable[[], Any], ask: str
) -> None:
    job = build_job()
    add(sqlite_database, job, build_call(job))
    with plans() as seen:
        SUMS[ask](sqlite_monitor, job.id)
    assert seen
    assert not [step for step in seen if step.startswith(("SCAN ai_usage_logs", "SCAN ai_jobs"))], seen
