"""Calls over a real socket: limits, aborts, cost, other routes, and postponed jobs."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest

from aijobs.job_types import flashcard_generation
from aijobs.jobs.lifecycle.statements import SAVED
from aijobs.testing.fakellm import Answer, FakeLlm, Reply, faults
from tests.integration.ai.conftest import KEY, LOOP, Live, LiveOpener
from tests.support.polling import poll

# --- time and cancel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [faults.hang(), faults.hang_after_headers(), faults.keep_alive(), faults.drip(0.3)])
def test_cancel_aborts_a_silent_or_endless_call(open_live: LiveOpener, step: Any) -> None:
    live = open_live()
    live.llm.script(step)
    job_id = live.new()
    delivery = live.stage.start(job_id)
    live.llm.wait_for_calls(1)
    live.stage.kit.lifecycle.request_cancel(job_id, "user:u1")
    live.llm.wait_until_left(1)
    assert delivery.wait() == "cancelled"
    (row,) = live.stage.usage(job_id)
    assert (row["error_code"], row["billed"]) == ("CANCELLED", "unknown")
    poll(lambda: live.stage.usage(job_id)[0]["completion_tokens"] is not None, what="the row tells what had come")
    assert live.stage.usage(job_id)[0]["estimated"]


def test_endless_stream_is_aborted_at_the_attempts_deadline(open_live: LiveOpener) -> None:
    live = open_live()
    job_type = live.stage.define(
        flashcard_generation.DEFINITION, timeout_ms=2500, abort_strategy="fail", max_retries=2, delay=10
    )
    job = live.run(faults.drip(0.3), job_type=job_type)
    assert (job.error_code, len(live.llm.calls)) == ("TIMEOUT", 1)
    assert live.llm.wait_until_left(1).client_left


SILENT = [
    faults.hang(),
    faults.hang_after_headers(),
    faults.keep_alive(every_s=0.05),
    faults.stall(),
]
"""Servers that send nothing, or stop sending."""


@pytest.mark.parametrize("step", SILENT, ids=lambda step: step.name)
@pytest.mark.parametrize(
    "limits",
    [pytest.param({}, marks=pytest.mark.long), {"first_data_s": 0.1, "idle_s": 0.1}],
    ids=["default limits", "short limits"],
)
def test_silent_provider_on_the_only_route_is_aborted_at_the_attempts_deadline(
    open_live: LiveOpener, step: Any, limits: dict[str, float]
) -> None:
    live = open_live(**limits)
    limit = {"timeout_ms": 2000, "abort_strategy": "fail", "max_retries": 2, "delay": 10}
    job = live.run(step, job_type=live.stage.define(flashcard_generation.DEFINITION, **limit))
    assert (job.error_code, job.attempt_no, len(live.llm.calls)) == ("TIMEOUT", 1, 1)
    assert live.llm.wait_until_left(1).client_left
    poll(lambda: live.stage.usage(job.id)[0]["latency_ms"] is not None, what="the call is closed")
    assert live.stage.usage(job.id)[0]["billed"] == "unknown"


def test_silent_provider_on_the_only_route_is_called_again_if_the_abort_strategy_is_retry(
    open_live: LiveOpener,
) -> None:
    live = open_live()
    limit = {"timeout_ms": 2000, "abort_strategy": "retry", "max_retries": 1, "delay": 10}
    job = live.run(faults.hang(), job_type=live.stage.define(flashcard_generation.DEFINITION, **limit))
    assert (job.error_code, job.attempt_no, len(live.llm.calls)) == ("TIMEOUT", 2, 2)


def test_late_provider_has_the_whole_attempt_if_no_other_route_is_left(open_live: LiveOpener) -> None:
    """An earlier defect: a model that took 70 s to load was cut off at half of its job's time, three times."""
    live = open_live(first_data_s=0.1, idle_s=0.1)
    job = live.run(faults.keep_alive(times=4, every_s=0.1))
    assert (job.lifecycle_status, len(live.llm.calls)) == ("succeeded", 1)


@pytest.mark.parametrize("step", SILENT[:3], ids=lambda step: step.name)
def test_silent_provider_is_aborted_before_the_deadline_if_another_route_is_left(
    open_live: LiveOpener, step: Any
) -> None:
    """A blank line every 50 ms is no progress."""
    with FakeLlm() as backup:
        live = open_live(second=backup.url, first_data_s=0.5)
        job = live.run(step)
        assert (job.lifecycle_status, job.attempt_no, len(backup.calls)) == ("succeeded", 1, 1)
        assert live.llm.wait_until_left(1).client_left
        rows = live.stage.usage(job.id)
        assert [(row["error_code"], row["billed"]) for row in rows] == [("PROVIDER_TIMEOUT", "unknown"), (None, "yes")]


def test_unavailable_route_is_no_reason_to_abort_a_silent_provider(open_live: LiveOpener) -> None:
    with FakeLlm() as backup:
        live = open_live(second=backup.url, first_data_s=0.1, failures=1)
        live.breaker.failed("backup.platform", code="PROVIDER_UNAVAILABLE")
        job = live.run(faults.keep_alive(times=4, every_s=0.1))
        assert (job.lifecycle_status, len(live.llm.calls), len(backup.calls)) == ("succeeded", 1, 0)


def test_call_that_stalls_until_the_deadline_counts_as_a_failure(open_live: LiveOpener) -> None:
    live = open_live(failures=1, idle_s=0.5)
    limit = {"timeout_ms": 2000, "abort_strategy": "fail", "delay": 10}
    live.run(faults.stall(), job_type=live.stage.define(flashcard_generation.DEFINITION, **limit))
    poll(lambda: live.breaker.states(["acme.platform"])[0].word == "open", what="the breaker is open")


# --- calls that were not sent --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["TIMEOUT", "CANCELLED"])
def test_unsent_call_is_not_billed_and_no_failure_of_the_provider(
    open_live: LiveOpener, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, stuck = open_live(failures=1), threading.Event()
    busy = threading.Event()
    LOOP.submit(hold(busy, stuck))  # Block the event loop, as on a machine without free processors.
    assert busy.wait(10)
    job_id = live.new()
    delivery = live.stage.start(job_id)
    poll(lambda: live.stage.usage(job_id), what="the call's row is open")
    (run,) = live.stage.active.all()
    if ends == "CANCELLED":
        live.stage.kit.lifecycle.request_cancel(job_id, "user:u1")
    else:
        live.stage.watcher.stop(run, ends)
    delivery.wait()
    stuck.set()
    poll(lambda: not live.stage.active.all(), what="the code returned")
    (row,) = live.stage.usage(job_id)
    assert (row["error_code"], row["billed"], row["prompt_tokens"]) == (ends, "no", None)
    assert live.llm.calls == []
    assert live.breaker.states(["acme.platform"])[0].word == "closed"


async def hold(busy: threading.Event, until: threading.Event) -> None:
    busy.set()
    assert until.wait(30)


def test_call_aborted_while_connecting_is_not_billed(open_live: LiveOpener) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as deaf:
        port = deaf.getsockname()[1]
        waiting = [socket.socket() for _ in range(8)]
        for each in waiting:  # Nobody accepts: once the backlog is full, the kernel answers no further connection.
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        live = open_live(base_url=f"http://127.0.0.1:{port}/v1")
        limit = {"timeout_ms": 1000, "abort_strategy": "fail", "delay": 10}
        job = live.run(Answer(), job_type=live.stage.define(flashcard_generation.DEFINITION, **limit))
        poll(lambda: live.stage.usage(job.id)[0]["billed"] != "unknown", what="the call is closed with what it cost")
        (row,) = live.stage.usage(job.id)
        assert (job.error_code, row["billed"]) == ("TIMEOUT", "no")
        for each in waiting:
            each.close()


def test_long_answer_reports_progress(open_live: LiveOpener) -> None:
    live = open_live()
    seen: list[int] = []
    live.llm.script(Answer(delta_s=0.05, delta_chars=20))
    job_id = live.new()
    delivery = live.stage.start(job_id)
    poll(lambda: seen.append(live.stage.kit.job(job_id).progress) or delivery.is_over, what="the job is over")
    assert delivery.wait() == "succeeded"
    between = {percent for percent in seen if 10 < percent < SAVED}
    assert between, f"no progress was seen between the request and the answer: {sorted(set(seen))}"


# --- retries -------------------------------------------------------------------------------------------------------


def test_blank_answer_is_requested_again_without_a_constraint(live: Live) -> None:
    job = live.run(faults.blank(), Answer())
    assert job.lifecycle_status == "succeeded"
    first, second = live.llm.calls
    assert first.body["response_format"]["type"] == "json_schema"
    assert "response_format" not in second.body


def test_truncated_answer_is_requested_again_shorter_with_more_tokens(live: Live) -> None:
    job = live.run(faults.truncated(), faults.truncated_valid(), Answer())
    assert job.lifecycle_status == "succeeded"
    room = [call.body["max_tokens"] for call in live.llm.calls]
    assert room == [8_000, 16_000, 32_000]
    assert "fewer or shorter items" in live.llm.calls[1].request.text()
    assert "JSON" not in live.llm.calls[1].request.text().split("Mend this:")[1]


@pytest.mark.parametrize("limits", [{"max_output_tokens": 4_000}, {"context_tokens": 6_000}, {}], ids=repr)
@pytest.mark.parametrize("fault", ["truncated", "huge"])
def test_request_after_a_too_long_answer_is_never_the_same(
    open_live: LiveOpener, limits: dict[str, int], fault: str
) -> None:
    live = open_live(**limits)
    job = live.run(faults.truncated() if fault == "truncated" else faults.build("huge", {"megabytes": 1.2}))
    assert job.error_code == ("VALIDATION_TRUNCATED" if fault == "truncated" else "VALIDATION_OUTPUT_TOO_LARGE")
    bodies = [json.dumps(call.body) for call in live.llm.calls]
    assert len(bodies) == len(set(bodies)) == 3
    asked = [call.request.text() for call in live.llm.calls]
    assert "of the items, and at least one" not in asked[0]
    assert "at most 1/2 of the items" in asked[1]
    assert "at most 1/4 of the items" in asked[2]


def test_retry_prompt_names_the_faults_of_the_last_answer(live: Live) -> None:
    job = live.run(Answer('{"cards": [{"card_type": "poem"}]}'), Answer())
    assert job.lifecycle_status == "succeeded"
    assert "Your last answer could not be used" not in live.llm.calls[0].request.text()
    appendix = live.llm.calls[1].request.text().split("Your last answer could not be used")[1]
    assert "card_type" in appendix


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_waits_as_long_as_the_provider_asks(live: Live, as_date: bool) -> None:
    live.llm.script(faults.too_many_requests(retry_after_s=90, as_date=as_date), Answer())
    job_id = live.new()
    clock = live.stage.kit.clock
    before = live.stage.kit.job(job_id).created_at
    live.stage.run(job_id)
    job = live.stage.kit.job(job_id)
    assert job.next_attempt_at is not None
    # A date has whole seconds and is relative to this machine's clock.
    assert job.next_attempt_at - before >= timedelta(seconds=88 if as_date else 90), clock


def test_lost_call_that_may_be_billed_is_repeated_only_once(live: Live) -> None:
    """An earlier defect: retries of client, engine and broker bought one answer four times."""
    job = live.run(faults.close_after_work())
    assert job.error_code == "PROVIDER_CONNECTION_LOST"
    assert len(live.llm.calls) == 2
    rows = live.stage.usage(job.id)
    assert [(row["attempt_no"], row["billed"]) for row in rows] == [(1, "unknown"), (2, "unknown")]


def test_every_attempt_records_its_cost(open_live: LiveOpener) -> None:
    live = open_live(name="deepseek")
    live.job_type = live.stage.define(flashcard_generation.DEFINITION, timeout_ms=4000, delay=10)
    usage = {"prompt_tokens": 100, "completion_tokens": 50}
    job = live.run(
        Answer("[]", usage=usage, model="deepseek-flash"),
        faults.hang(),
        Answer(usage={"prompt_tokens": 120, "completion_tokens": 60}, model="deepseek-flash"),
    )
    assert job.lifecycle_status == "succeeded"
    rows = live.stage.usage(job.id)
    assert [(row["prompt_tokens"], row["completion_tokens"], row["estimated"]) for row in rows] == [
        (100, 50, False),
        (rows[1]["prompt_tokens"], 0, True),
        (120, 60, False),
    ]
    assert [row["billed"] for row in rows] == ["yes", "unknown", "yes"]
    assert all(row["cost_micros"] for row in (rows[0], rows[2]))


# --- servers and constraints ---------------------------------------------------------------------------------------


def test_unsupported_json_schema_is_remembered_for_the_next_job(live: Live) -> None:
    live.run(faults.no_json_schema())
    job = live.run(faults.no_json_schema())
    assert job.lifecycle_status == "succeeded"
    formats = [call.body["response_format"]["type"] for call in live.llm.calls]
    assert formats == ["json_schema", "json_object", "json_object"]


def test_unreachable_server_costs_nothing(open_live: LiveOpener) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        live = open_live(base_url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        job = live.run()
    assert job.error_code == "PROVIDER_UNAVAILABLE"
    assert [row["billed"] for row in live.stage.usage(job.id)] == ["no"] * 3


def test_answer_without_streaming_is_understood(live: Live) -> None:
    def whole(request: Any) -> Any:
        choice = {"index": 0, "message": {"role": "assistant", "content": "[]"}, "finish_reason": "stop"}
        return {"id": "x", "model": "m1", "choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}

    job = live.run(Reply(200, whole))
    assert job.error_code == "VALIDATION_OUTPUT_NOT_JSON"
    assert live.stage.usage(job.id)[0]["prompt_tokens"] == 7


def test_body_of_a_huge_error_is_not_read(live: Live) -> None:
    job = live.run(Reply(500, {"error": {"message": "x" * 20_000_000}}))
    assert job.error_code == "PROVIDER_UNAVAILABLE"
    assert len(live.stage.kit.row(job.id)["internal_error_message"]) < 16_000


def test_redirect_is_not_followed(open_live: LiveOpener) -> None:
    with FakeLlm() as elsewhere:
        live = open_live()
        job = live.run(faults.redirect(f"{elsewhere.url}/v1/chat/completions", status=307))
        assert job.error_code == "INTERNAL_CONFIG"
        assert elsewhere.calls == []


def test_cost_is_that_of_the_model_that_answered(open_live: LiveOpener) -> None:
    live = open_live(name="deepseek")
    job = live.run(Answer(model="deepseek-flash-20260801", usage={"prompt_tokens": 1000, "completion_tokens": 0}))
    (row,) = live.stage.usage(job.id)
    assert row["model"] == "deepseek-flash-20260801"
    assert row["cost_micros"] in (150, 300), "a dated name has its model's price, doubled at peak hours"
    unknown = live.run(Answer(model="m-unheard-of"))
    (row,) = live.stage.usage(unknown.id)
    assert (row["cost_micros"], row["billed"]) == (None, "yes"), "an unknown price isn't zero"


@pytest.mark.parametrize("count", [True, 12.0, "12", -3, 10**30, [7], {"n": 7}], ids=repr)
def test_invalid_token_count_is_unknown_and_so_is_the_cost(live: Live, count: Any) -> None:
    for name in ("prompt_tokens", "completion_tokens"):
        usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100, name: count}
        job = live.run(Answer(model="deepseek-flash", usage=usage))
        (row,) = live.stage.usage(job.id)
        assert job.lifecycle_status == "succeeded"
        assert (row[name], row["cost_micros"], row["billed"], row["estimated"]) == (None, None, "yes", False)


def test_invalid_count_of_cached_tokens_is_unknown(live: Live) -> None:
    details = {"prompt_tokens_details": {"cached_tokens": True}}
    job = live.run(Answer(usage={"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100, **details}))
    (row,) = live.stage.usage(job.id)
    assert (row["prompt_tokens"], row["cached_tokens"], row["cost_micros"]) == (1000, None, None)


# --- other routes, the breaker, slots ------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [faults.server_error(), faults.no_balance(), faults.bad_key(), faults.hang()])
def test_failed_provider_is_followed_by_the_next_on_the_route(open_live: LiveOpener, step: Any) -> None:
    with FakeLlm() as backup:
        live = open_live(second=backup.url, first_data_s=3)
        job = live.run(step)
        assert job.lifecycle_status == "succeeded"
        assert (len(live.llm.calls), len(backup.calls), job.retry_count) == (1, 1, 0)
    first, second = live.stage.usage(job.id)
    assert [(row["provider"], row["attempt_no"], row["call_no"]) for row in (first, second)] == [
        ("acme", 1, 1),
        ("backup", 1, 2),
    ]
    assert (first["state"], second["state"], second["billed"]) == ("failed", "done", "yes")


@pytest.mark.parametrize("step", [faults.close_after_work(), faults.content_exists_risk(), faults.context_openai()])
def test_possibly_billed_or_permanent_failure_is_not_tried_on_another_route(open_live: LiveOpener, step: Any) -> None:
    with FakeLlm() as backup:
        live = open_live(second=backup.url)
        live.llm.script(step)
        live.stage.run(live.new())
        assert backup.calls == []


def test_jobs_are_postponed_while_a_providers_account_is_exhausted(open_live: LiveOpener) -> None:
    """One job learns it; the others must not use up their attempts."""
    live = open_live(failures=5)
    assert live.run(faults.no_balance()).error_code == "PROVIDER_ACCOUNT_EXHAUSTED"
    live.llm.script(Answer())
    waiting = [live.new() for _ in range(5)]
    assert [live.stage.run(job_id) for job_id in waiting] == ["postponed"] * 5
    assert len(live.llm.calls) == 1
    for job_id in waiting:
        job = live.stage.kit.job(job_id)
        assert (job.lifecycle_status, job.locked_by, job.retry_count, job.lost_count) == ("running", None, 0, 0)
        assert job.next_attempt_at is not None
        assert live.stage.kit.types(job_id) == ["created", "locked", "postponed"]
    live.breaker.reset("acme.platform")
    assert {live.stage.run_to_end(job_id).lifecycle_status for job_id in waiting} == {"succeeded"}


def test_usage_row_of_a_call_before_a_postponement_is_closed(open_live: LiveOpener) -> None:
    """One route's account is exhausted, the other's breaker is open: the job waits, and no usage row may stay open."""
    with FakeLlm() as backup:
        live = open_live(second=backup.url)
        live.breaker.failed("backup.platform", exhausted=True)
        live.llm.script(faults.no_balance())
        job_id = live.new()
        assert live.stage.run(job_id) == "postponed"
        (row,) = live.stage.usage(job_id)
    assert (row["state"], row["error_code"], row["billed"]) == ("failed", "PROVIDER_ACCOUNT_EXHAUSTED", "no")


def test_job_that_waits_too_long_for_its_provider_fails(open_live: LiveOpener) -> None:
    live = open_live()
    job_id = live.new()
    live.breaker.failed("acme.platform", exhausted=True)
    words = []
    for _ in range(3):
        for hours in (2, 0.9, 0.1):  # The first two hours are no wait for a provider.
            live.stage.kit.advance(hours * 3600)
            words.append(live.stage.run(job_id))
    assert words == [*["postponed", "postponed", "retry_scheduled"] * 2, "postponed", "postponed", "failed"]
    job = live.stage.kit.job(job_id)
    assert (job.error_code, job.retry_count, live.llm.calls) == ("PROVIDER_UNAVAILABLE", 2, [])


def test_calls_beyond_the_providers_limit_wait(open_live: LiveOpener) -> None:
    live = open_live(max_concurrent_calls=2)
    live.llm.script(Answer(delta_s=0.06))
    jobs = [live.new() for _ in range(4)]
    for delivery in [live.stage.start(job_id) for job_id in jobs]:
        assert delivery.wait(60) in ("succeeded", "postponed")
    assert {live.stage.run_to_end(job_id).lifecycle_status for job_id in jobs} == {"succeeded"}
    calls = live.llm.wait_for_calls(4, ended=True)
    spans = [(call.received_at, call.received_at + timedelta(seconds=call.ended_after_s or 0)) for call in calls]
    # The next client may enter while the server still records the end of the previous one.
    slack = timedelta(seconds=0.5)
    assert max(sum(begin < at < end - slack for begin, end in spans) for at, _ in spans) <= 2


# --- keys ----------------------------------------------------------------------------------------------------------


def test_users_key_pays_only_for_that_users_job(live: Live) -> None:
    (own, _), platforms = live.new_on("sk-user-abcdefghijklmnop"), live.new()
    assert {live.stage.run_to_end(job_id).lifecycle_status for job_id in (own, platforms)} == {"succeeded"}
    assert [call.key for call in live.llm.calls] == ["sk-user-abcdefghijklmnop", KEY]
    assert [live.stage.usage(job_id)[0]["credential_mode"] for job_id in (own, platforms)] == [
        "user_deepseek_key",
        "platform_key",
    ]


@pytest.mark.parametrize(
    ("step", "code"),
    [(faults.bad_key(), "CREDENTIAL_INVALID"), (faults.no_balance(), "CREDENTIAL_INSUFFICIENT_BALANCE")],
)
def test_invalid_user_key_fails_only_that_users_job(live: Live, step: Any, code: str) -> None:
    own, _ = live.new_on("sk-user-abcdefghijklmnop")
    live.llm.script(step, key="sk-user-abcdefghijklmnop")
    assert live.stage.run_to_end(own).error_code == code
    assert live.run(Answer()).lifecycle_status == "succeeded"
    assert [call.key for call in live.llm.calls] == ["sk-user-abcdefghijklmnop", KEY], "each key pays for its own job"


# --- limits of servers and their answers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "field", "asked"),
    [
        ("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", "max_completion_tokens", 8_000),
        ("max_tokens is too large: 8000. This model supports at most 4096 completion tokens.", "max_tokens", 4_096),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens "
            "(1000 in the messages, 8000 in the completion). Please reduce the length.",
            "max_tokens",
            7_128,
        ),
    ],
)
def test_request_is_adapted_to_a_servers_limits_within_the_attempt(
    live: Live, message: str, field: str, asked: int
) -> None:
    job = live.run(Reply(400, {"error": {"message": message, "type": "invalid_request_error"}}), Answer())
    assert (job.lifecycle_status, job.retry_count) == ("succeeded", 0)
    first, second = live.llm.calls
    assert (first.body["max_tokens"], second.body[field]) == (8_000, asked)
    assert field == "max_tokens" or "max_tokens" not in second.body


def test_credentials_in_the_environment_are_not_used(open_live: LiveOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier defect: environment variables of the client's library named a key that then paid for our calls."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-program")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-other")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-other")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer sk-other\nX-Forwarded-For: elsewhere")
    live = open_live()
    assert live.run(Answer()).lifecycle_status == "succeeded"
    (call,) = live.llm.calls
    assert call.key == KEY
    assert "other" not in str(call.headers)
    assert not {"openai-organization", "openai-project", "x-forwarded-for"} & set(call.headers)


def test_server_that_needs_no_key_gets_none(open_live: LiveOpener) -> None:
    live = open_live(key=None, needs_key=False)
    assert live.run(Answer()).lifecycle_status == "succeeded"
    assert "authorization" not in live.llm.calls[0].headers


def test_compressed_answer_is_not_decompressed(live: Live) -> None:
    """A few kilobytes could expand to gigabytes."""
    bomb = gzip.compress(b"data: " + b" " * 50_000_000)
    job = live.run(Reply(200, bomb, "text/event-stream", {"Content-Encoding": "gzip"}))
    assert job.error_code == "PROVIDER_UNAVAILABLE"
    assert {call.headers["accept-encoding"] for call in live.llm.calls} == {"identity"}


def test_hanging_provider_opens_the_breaker_at_the_default_limits(open_live: LiveOpener) -> None:
    """An earlier defect: no attempt was long enough to reach the limit for first data, so no failure was counted."""
    with FakeLlm() as backup:
        live = open_live(second=backup.url, first_data_s=120, failures=1)
        job_type = live.stage.define(flashcard_generation.DEFINITION, timeout_ms=4000, delay=10)
        job = live.run(faults.hang(), job_type=job_type)
        assert (job.lifecycle_status, job.retry_count, len(backup.calls)) == ("succeeded", 0, 1)
        assert [state.word for state in live.breaker.states(["acme.platform"])] == ["open"]
