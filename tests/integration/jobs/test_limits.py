"""Limits of one user: active jobs, and quotas a day and a month, also under concurrent requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from aijobs.ai.billing.forecast import INSTRUCTIONS, Forecaster
from aijobs.ai.billing.usage import CallResult, UsageLog, mark_lost
from aijobs.ai.provider import Route
from aijobs.db.clock import ManualClock
from aijobs.errors import ApiError
from aijobs.job_types import flashcard_generation
from aijobs.jobs.lease import Lease
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput
from aijobs.upkeep.retention import Retention
from tests.support.databases import OTHERS_LATER, Databases, SqliteDatabases
from tests.support.jobs import BEGIN, Kit, open_kit, race
from tests.support.rows import add, build_call, build_job, ended
from tests.support.scratch import scratch_database

ANSWER = flashcard_generation.DEFINITION.max_output_tokens
EMPTY = CreateJobInput("u1", "flashcard_generation", "note", "n1", flashcard_generation.SAMPLE_INPUT)


@contextmanager
def limited(server: Databases, **settings: int) -> Iterator[Kit]:
    with open_kit(scratch_database(server), clock=ManualClock(BEGIN), **settings) as kit:
        yield kit


def refused(kit: Kit, *, cards: bool = False, **changes: Any) -> ApiError:
    """Return the error of a new job that is refused."""
    with pytest.raises(ApiError) as caught:
        kit.jobs.create_job(EMPTY) if cards else kit.new_job(**changes)
    return caught.value


def reserve(kit: Kit) -> int:
    """Return the number of tokens that a flashcard job reserves."""
    forecaster = Forecaster(kit.services.router.routes, kit.services.costs)
    definition = flashcard_generation.DEFINITION
    return forecaster.call(definition, "platform_key", flashcard_generation.SAMPLE_INPUT, BEGIN).tokens


# --- jobs at once --------------------------------------------------------------------------------------------------


def test_hundred_creates_at_once_create_as_many_jobs_as_allowed(database_server: Databases) -> None:
    with open_kit(scratch_database(database_server), user_active_jobs=7, quota_day_tokens=10**6) as kit:
        made = race(*(lambda: kit.jobs.create_job(EMPTY) for _ in range(100)))
        codes = [one.code for one in made if isinstance(one, ApiError)]
        assert codes == ["TOO_MANY_JOBS"] * 93
        assert len(made) - len(codes) == 7
        counts = kit.counts()
        assert counts["ai_jobs"] == counts["quota_reservations"] == counts["outbox_events"] == 7, "and no more rows"


@OTHERS_LATER
def test_hundred_creates_at_once_reserve_at_most_the_quota(database_server: Databases) -> None:
    with open_kit(scratch_database(database_server), quota_month_tokens=100_000) as kit:
        fits = 100_000 // reserve(kit)
        made = race(*(lambda: kit.jobs.create_job(EMPTY) for _ in range(100)))
        assert [one.code for one in made if isinstance(one, ApiError)] == ["QUOTA_EXCEEDED"] * (100 - fits)
        assert sum(row["tokens"] for row in kit.rows("quota_reservations")) == fits * reserve(kit) <= 100_000


def test_user_with_too_many_jobs_is_refused_and_another_is_not(database_server: Databases) -> None:
    with limited(database_server, user_active_jobs=2) as kit:
        kit.new_job()
        lease = kit.running()
        before = kit.everything()
        error = refused(kit)
        assert (error.code, error.details) == ("TOO_MANY_JOBS", {"limit": "userActiveJobs", "used": 2, "allowed": 2})
        assert error.retry_after is not None
        assert kit.everything() == before, "nothing was written"
        kit.new_job(user_id="u2")
        kit.lifecycle.release(lease)
        assert refused(kit).code == "TOO_MANY_JOBS", "a job that waits for its next attempt is still active"
        kit.jobs.cancel(lease.job_id, "user:u1")
        kit.new_job()


def test_repeated_key_returns_its_job_before_any_limit(database_server: Databases) -> None:
    with limited(database_server, user_active_jobs=1, quota_day_jobs=1) as kit:
        first = kit.create(idempotency_key="k")
        again = kit.create(idempotency_key="k")
        assert (again.created, again.job.id) == (False, first.job.id)
        assert refused(kit, idempotency_key="k2").code == "TOO_MANY_JOBS"


def test_no_limit_counts_and_reserves_nothing(sqlite: SqliteDatabases) -> None:
    with limited(sqlite) as kit:
        kit.new_job()
        with kit.statements() as seen:
            kit.jobs.create_job(EMPTY)
        assert not [statement for statement in seen if "count(" in statement.lower() or "quota_res" in statement]


def test_operators_retry_ignores_limits_and_counts_as_used(database_server: Databases) -> None:
    with limited(database_server, user_active_jobs=1, quota_day_tokens=ANSWER * 3) as kit:
        failed = kit.jobs.create_job(EMPTY).job.id
        kit.jobs.cancel(failed, "user:u1")
        kit.new_job()
        child = kit.jobs.retry(failed, "operator:ann").job
        assert child.trigger_type == "admin"
        assert [row["job_id"] for row in kit.rows("quota_reservations")] == [failed, child.id]
        error = refused(kit)
        assert (error.code, error.details and error.details["used"]) == ("TOO_MANY_JOBS", 2)


# --- quotas --------------------------------------------------------------------------------------------------------


def test_day_quota_resets_at_midnight_utc(database_server: Databases) -> None:
    with limited(database_server, quota_day_jobs=2) as kit:
        kit.new_job()
        kit.new_job()
        error = refused(kit)
        assert error.code == "QUOTA_EXCEEDED"
        assert error.details == {
            "limit": "quotaDayJobs",
            "period": "day",
            "used": 2,
            "needed": 1,
            "allowed": 2,
            "resetsAt": "2026-03-02T00:00:00.000Z",
        }
        assert error.retry_after == timedelta(hours=16)
        kit.clock.at = datetime(2026, 3, 1, 23, 59, 59, 999000, tzinfo=UTC)  # type: ignore[attr-defined]
        assert refused(kit).retry_after == timedelta(milliseconds=1)
        kit.advance(0.001)
        kit.new_job()


@pytest.mark.parametrize(
    ("at", "resets"),
    [
        (datetime(2026, 12, 31, 23, 0, tzinfo=UTC), "2027-01-01T00:00:00.000Z"),
        (datetime(2028, 2, 1, 0, 0, tzinfo=UTC), "2028-03-01T00:00:00.000Z"),
        (datetime(2026, 4, 30, 12, 0, tzinfo=UTC), "2026-05-01T00:00:00.000Z"),
    ],
)
def test_refusal_names_the_quota_that_resets_last(sqlite: SqliteDatabases, at: datetime, resets: str) -> None:
    with limited(sqlite, quota_day_jobs=1, quota_month_jobs=1) as kit:
        kit.clock.at = at  # type: ignore[attr-defined]
        kit.new_job()
        error = refused(kit)
        assert error.details is not None
        assert (error.details["limit"], error.details["resetsAt"]) == ("quotaMonthJobs", resets)


def test_job_that_ended_before_a_provider_call_does_not_count(database_server: Databases) -> None:
    with limited(database_server, quota_day_jobs=1) as kit:
        kit.jobs.cancel(kit.new_job().id, "user:u1")
        job = kit.new_job()
        refused(kit)
        lease = kit.lock(job.id)
        kit.database.write(lambda session: kit.lifecycle.note_provider_call(session, lease) and None)
        add(kit.database, build_call(job))
        kit.jobs.cancel(job.id, "user:u1")
        kit.lifecycle.mark_cancelled(lease)
        assert refused(kit).code == "QUOTA_EXCEEDED", "a provider was called, so it counts"


def test_open_jobs_reserve_tokens_until_they_end(database_server: Databases) -> None:
    with limited(database_server, quota_day_tokens=ANSWER * 3) as kit:
        need = reserve(kit)
        jobs = [kit.jobs.create_job(EMPTY).job for _ in range(2)]
        error = refused(kit, cards=True)
        assert error.details is not None
        assert (error.details["limit"], error.details["used"]) == ("quotaDayTokens", 2 * need)
        assert error.details["needed"] == need
        kit.jobs.cancel(jobs[0].id, "user:u1")
        third = kit.jobs.create_job(EMPTY).job
        lease = kit.lock(third.id)
        kit.lifecycle.mark_succeeded(lease)
        assert kit.jobs.create_job(EMPTY).created


def test_next_attempt_reserves_as_much_again(
    database_server: Databases,
) -> None:
    with limited(database_server, quota_day_tokens=ANSWER * 5) as kit:
        need = reserve(kit)
        job = kit.jobs.create_job(EMPTY).job

        def used() -> int:
            with open_kit(kit.url, clock=kit.clock, quota_day_tokens=need) as other:
                error = refused(other, cards=True)
            assert error.details is not None
            return int(error.details["used"])

        def call(lease: Lease, number: int, prompt: int | None, **changes: Any) -> None:
            columns = {"attempt_no": lease.attempt_no, "call_no": number, "started_at": BEGIN, "completion_tokens": 0}
            add(kit.database, build_call(job, prompt_tokens=prompt, **{**columns, **changes}))

        assert used() == need
        first = kit.lock(job.id)
        call(first, 1, 500)
        assert used() == need, "500 of the reservation are spent"
        call(first, 2, None, state="failed")
        assert used() == need
        call(first, 3, need)
        assert used() == need + 500, "an excess over the reservation counts"
        kit.lifecycle.release(first)
        assert used() == need + 500 + need, "the next attempt costs as much again"
        second = kit.lock(job.id)
        call(second, 1, 200)
        assert used() == need + 500 + need
        kit.lifecycle.save_output(second, {"cards": [], "dropped": []})
        assert used() == need + 700, "it has its answer and makes no more calls"
        kit.lifecycle.mark_succeeded(second)
        assert used() == need + 700


def test_call_of_a_lost_worker_counts_its_estimated_prompt(
    database_server: Databases,
) -> None:
    with limited(database_server, quota_day_tokens=10**6) as kit:
        lease = kit.running()
        usage = UsageLog(kit.clock)

        def begin(session: Session) -> None:
            job = session.get(AiJob, lease.job_id)
            assert job is not None
            usage.open(session, job, "deepseek", "m", prompt_estimate=1234)

        kit.database.write(begin)
        kit.database.write(lambda session: mark_lost(session, kit.clock, lease.job_id, lease.attempt_no))
        kit.lifecycle.mark_succeeded(lease)
        (row,) = kit.rows("ai_usage_logs")
        closed = {name: row[name] for name in ("state", "billed", "prompt_tokens", "cost_micros")}
        assert closed == {"state": "lost", "billed": "unknown", "prompt_tokens": 1234, "cost_micros": None}
        assert row["estimated"]
        with open_kit(kit.url, clock=kit.clock, quota_day_tokens=1) as other:
            error = refused(other, cards=True)
        assert error.details is not None
        assert error.details["used"] == 1234


@pytest.mark.parametrize(
    ("result", "prompt", "estimated"),
    [
        (CallResult("p", "m", prompt_tokens=70, completion_tokens=9, billed="yes"), 70, False),
        (CallResult("p", "m", prompt_tokens=0, billed="unknown"), 0, False),
        (CallResult("p", "m", billed="no", error_code="PROVIDER_RATE_LIMITED"), None, False),
        (CallResult("p", "m", billed="unknown", error_code="PROVIDER_CONNECTION_LOST"), 50, True),
    ],
)
def test_estimate_stays_only_if_an_unknown_call_may_have_been_billed(
    sqlite_kit: Kit, result: CallResult, prompt: int | None, estimated: bool
) -> None:
    kit, usage = sqlite_kit, UsageLog(sqlite_kit.clock)
    lease = kit.running()

    def begin(session: Session) -> str:
        job = session.get(AiJob, lease.job_id)
        assert job is not None
        return usage.open(session, job, "p", "m", prompt_estimate=50)

    call = kit.database.write(begin)
    kit.database.write(lambda session: usage.close(session, call, result))
    (row,) = kit.rows("ai_usage_logs")
    assert (row["prompt_tokens"], bool(row["estimated"])) == (prompt, estimated)


def test_job_larger_than_a_whole_quota_has_no_retry_after(sqlite: SqliteDatabases) -> None:
    with limited(sqlite, quota_day_tokens=ANSWER) as kit:
        error = refused(kit, cards=True)
        assert (error.code, error.retry_after) == ("QUOTA_EXCEEDED", None)
        assert error.details is not None
        assert "resetsAt" not in error.details
        kit.new_job()


def test_forecast_uses_the_most_expensive_platform_route_at_its_current_price(
    sqlite: SqliteDatabases,
) -> None:
    quiet, busy = datetime(2026, 3, 1, 8, tzinfo=UTC), datetime(2026, 3, 2, 2, tzinfo=UTC)
    with limited(sqlite) as kit:
        definition, costs = flashcard_generation.DEFINITION, kit.services.costs
        routes = (Route("deepseek", "deepseek-flash"), Route("deepseek", "deepseek-v4-pro"), Route("nobody", "m"))
        forecaster = Forecaster(lambda definition, mode: routes, costs)
        forecast = forecaster.call(definition, "platform_key", {"text": "x" * 400}, quiet)
        assert INSTRUCTIONS + 100 + ANSWER < forecast.tokens < INSTRUCTIONS + 110 + ANSWER
        prompt = forecast.tokens - ANSWER
        assert forecast.cost_micros == -(-(prompt * 660_000 + ANSWER * 1_980_000) // 1_000_000) or (
            abs(forecast.cost_micros - (prompt * 0.66 + ANSWER * 1.98)) <= 1
        )
        assert forecaster.call(definition, "platform_key", {"text": "x" * 400}, busy).cost_micros in range(
            2 * forecast.cost_micros - 1, 2 * forecast.cost_micros + 2
        )
        assert forecaster.call(definition, "user_deepseek_key", {"text": "x"}, quiet).tokens == 0
        soon = datetime(2026, 3, 2, 0, 59, tzinfo=UTC)  # 08:59 in Beijing, a minute before the price doubles.
        assert forecaster.call(definition, "platform_key", {"text": "x" * 400}, soon) == forecaster.call(
            definition, "platform_key", {"text": "x" * 400}, busy
        )
        unpriced = Forecaster(lambda definition, mode: routes[2:], costs)
        assert unpriced.call(definition, "platform_key", {"text": "x"}, quiet).cost_micros == 0


def test_only_platform_calls_since_the_start_of_the_period_count(database_server: Databases) -> None:
    with limited(database_server, quota_day_cost_micros=100, quota_month_cost_micros=1000) as kit:
        job = build_job(**ended("succeeded"))
        add(kit.database, job)

        def spend(call_no: int, cost: int | None, at: datetime, **changes: Any) -> None:
            add(kit.database, build_call(job, call_no=call_no, cost_micros=cost, started_at=at, **changes))

        spend(1, 99, BEGIN)
        spend(2, 5000, BEGIN, credential_mode="user_deepseek_key")
        spend(3, None, BEGIN)
        spend(4, 5000, BEGIN - timedelta(days=1))
        kit.new_job()
        kit.new_job(), kit.new_job(user_id="u2")
        spend(5, 1, BEGIN)
        kit.new_job()
        spend(6, 1, BEGIN)
        error = refused(kit)
        assert error.details is not None
        assert (error.details["limit"], error.details["used"]) == ("quotaDayCostMicros", 101)
        kit.advance(86_400)
        kit.new_job()
        spend(7, 900, BEGIN + timedelta(hours=2))
        error = refused(kit)
        assert error.details is not None
        assert (error.details["limit"], error.details["used"]) == ("quotaMonthCostMicros", 1001)


# --- rows ----------------------------------------------------------------------------------------------------------


def test_reservation_is_deleted_with_its_job(database_server: Databases) -> None:
    with limited(database_server, quota_day_tokens=10**6) as kit:
        job = kit.jobs.create_job(EMPTY).job
        kit.jobs.cancel(job.id, "user:u1")
        assert kit.counts()["quota_reservations"] == 1
        kit.advance(86_400 * 200)
        day = timedelta(days=1)
        Retention(kit.database, kit.clock, keep_jobs=day, keep_tombstones=day, keep_sessions=day).run()
        assert {"ai_jobs", "quota_reservations"}.isdisjoint(kit.counts())


def test_retry_that_inherits_an_output_reserves_nothing(sqlite: SqliteDatabases) -> None:
    with limited(sqlite, quota_day_tokens=10**6) as kit:
        job = kit.jobs.create_job(EMPTY).job
        lease = kit.lock(job.id)
        kit.lifecycle.save_output(lease, {"cards": [], "dropped": []})
        kit.jobs.cancel(job.id, "user:u1")
        kit.lifecycle.mark_cancelled(lease)
        kit.jobs.retry(job.id, "operator:ann")
        assert [row["job_id"] for row in kit.rows("quota_reservations")] == [job.id]


def test_counts_beyond_32_bits_are_added_correctly(database_server: Databases) -> None:
    with limited(database_server, quota_day_tokens=10**8) as kit:
        job = build_job(**ended("succeeded"))
        most = 2**31 - 1
        add(kit.database, job, build_call(job, prompt_tokens=most, completion_tokens=most, started_at=BEGIN))
        error = refused(kit, cards=True)
        assert error.details is not None
        assert error.details["used"] == 2 * most
