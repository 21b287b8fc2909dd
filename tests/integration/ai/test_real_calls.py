"""Calls over a real socket: how they are bounded, aborted, paid, tried elsewhere, and put off."""

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
def test_a_cancel_reaches_the_wire_though_the_provider_says_nothing_or_never_ends(
    open_live: LiveOpener, step: Any
) -> None:
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


def test_a_stream_that_never_ends_is_cut_at_the_attempts_deadline(open_live: LiveOpener) -> None:
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
"""Servers that say nothing, or nothing more."""


@pytest.mark.parametrize("step", SILENT, ids=lambda step: step.name)
@pytest.mark.parametrize(
    "limits",
    [pytest.param({}, marks=pytest.mark.long), {"first_data_s": 0.1, "idle_s": 0.1}],
    ids=["default limits", "short limits"],
)
def test_a_silent_provider_on_the_only_route_is_cut_at_the_attempts_deadline(
    open_live: LiveOpener, step: Any, limits: dict[str, float]
) -> None:
    live = open_live(**limits)
    limit = {"timeout_ms": 2000, "abort_strategy": "fail", "max_retries": 2, "delay": 10}
    job = live.run(step, job_type=live.stage.define(flashcard_generation.DEFINITION, **limit))
    assert (job.error_code, job.attempt_no, len(live.llm.calls)) == ("TIMEOUT", 1, 1)
    assert live.llm.wait_until_left(1).client_left
    poll(lambda: live.stage.usage(job.id)[0]["latency_ms"] is not None, what="the call is closed")
    assert live.stage.usage(job.id)[0]["billed"] == "unknown"


def test_a_silent_provider_on_the_only_route_is_asked_again_if_the_abort_strategy_is_retry(
    open_live: LiveOpener,
) -> None:
    live = open_live()
    limit = {"timeout_ms": 2000, "abort_strategy": "retry", "max_retries": 1, "delay": 10}
    job = live.run(faults.hang(), job_type=live.stage.define(flashcard_generation.DEFINITION, **limit))
    assert (job.error_code, job.attempt_no, len(live.llm.calls)) == ("TIMEOUT", 2, 2)


def test_a_provider_that_is_late_has_the_whole_attempt_if_no_other_route_is_left(open_live: LiveOpener) -> None:
    """A model that was loaded for 70 s was cut at half of its job's time, three times."""
    live = open_live(first_data_s=0.1, idle_s=0.1)
    job = live.run(faults.keep_alive(times=4, every_s=0.1))
    assert (job.lifecycle_status, len(live.llm.calls)) == ("succeeded", 1)


@pytest.mark.parametrize("step", SILENT[:3], ids=lambda step: step.name)
def test_a_silent_provider_is_given_up_before_the_deadline_if_another_route_is_left(
    open_live: LiveOpener, step: Any
) -> None:
    """A blank line each twentieth of a second is no progress."""
    with FakeLlm() as backup:
        live = open_live(second=backup.url, first_data_s=0.5)
        job = live.run(step)
        assert (job.lifecycle_status, job.attempt_no, len(backup.calls)) == ("succeeded", 1, 1)
        assert live.llm.wait_until_left(1).client_left
        rows = live.stage.usage(job.id)
        assert [(row["error_code"], row["billed"]) for row in rows] == [("PROVIDER_TIMEOUT", "unknown"), (None, "yes")]


def test_a_route_that_can_not_be_asked_now_is_no_reason_to_give_up_a_silent_provider(open_live: LiveOpener) -> None:
    with FakeLlm() as backup:
        live = open_live(second=backup.url, first_data_s=0.1, failures=1)
        live.breaker.failed("backup.platform", code="PROVIDER_UNAVAILABLE")
        job = live.run(faults.keep_alive(times=4, every_s=0.1))
        assert (job.lifecycle_status, len(live.llm.calls), len(backup.calls)) == ("succeeded", 1, 0)


def test_a_stalled_provider_counts_as_unwell_though_the_deadline_cut_it(open_live: LiveOpener) -> None:
    live = open_live(failures=1, idle_s=0.5)
    limit = {"timeout_ms": 2000, "abort_strategy": "fail", "delay": 10}
    live.run(faults.stall(), job_type=live.stage.define(flashcard_generation.DEFINITION, **limit))
    poll(lambda: live.breaker.states(["acme.platform"])[0].word == "open", what="the breaker is open")


# --- calls that didn't leave ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["TIMEOUT", "CANCELLED"])
def test_a_call_that_did_not_leave_is_not_billed_and_no_fault_of_the_provider(
    open_live: LiveOpener, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, stuck = open_live(failures=1), threading.Event()
    busy = threading.Event()
    LOOP.submit(hold(busy, stuck))  # Other calls keep the loop, as a process does that gets no processor.
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


def test_a_call_that_was_cut_while_it_connected_is_not_billed(open_live: LiveOpener) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as deaf:
        port = deaf.getsockname()[1]
        waiting = [socket.socket() for _ in range(8)]
        for each in waiting:  # Nobody accepts: once the backlog is full the kernel answers no further connection.
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


def test_a_long_answer_shows_how_far_it_is(open_live: LiveOpener) -> None:
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


def test_a_blank_answer_is_asked_for_again_without_a_constraint(live: Live) -> None:
    job = live.run(faults.blank(), Answer())
    assert job.lifecycle_status == "succeeded"
    first, second = live.llm.calls
    assert first.body["response_format"]["type"] == "json_schema"
    assert "response_format" not in second.body


def test_an_answer_that_was_cut_off_gets_more_room_and_is_asked_for_less(live: Live) -> None:
    job = live.run(faults.truncated(), faults.truncated_valid(), Answer())
    assert job.lifecycle_status == "succeeded"
    room = [call.body["max_tokens"] for call in live.llm.calls]
    assert room == [8_000, 16_000, 32_000]
    assert "fewer or shorter items" in live.llm.calls[1].request.text()
    assert "JSON" not in live.llm.calls[1].request.text().split("Mend this:")[1]


@pytest.mark.parametrize("limits", [{"max_output_tokens": 4_000}, {"context_tokens": 6_000}, {}], ids=repr)
@pytest.mark.parametrize("fault", ["truncated", "huge"])
def test_an_answer_that_is_too_long_under_a_providers_limit_is_never_asked_for_in_the_same_bytes(
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


def test_prompt_of_a_retry_names_the_faults_of_the_last_answer(live: Live) -> None:
    job = live.run(Answer('{"cards": [{"card_type": "poem"}]}'), Answer())
    assert job.lifecycle_status == "succeeded"
    assert "Your last answer could not be used" not in live.llm.calls[0].request.text()
    told = live.llm.calls[1].request.text().split("Your last answer could not be used")[1]
    assert "card_type" in told


@pytest.mark.parametrize("as_date", [False, True])
def test_no_call_comes_before_the_provider_wants_it(live: Live, as_date: bool) -> None:
    live.llm.script(faults.too_many_requests(retry_after_s=90, as_date=as_date), Answer())
    job_id = live.new()
    clock = live.stage.kit.clock
    before = live.stage.kit.job(job_id).created_at
    live.stage.run(job_id)
    job = live.stage.kit.job(job_id)
    assert job.next_attempt_at is not None
    # A date has whole seconds, and counts from this machine's own clock.
    assert job.next_attempt_at - before >= timedelta(seconds=88 if as_date else 90), clock


def test_a_call_that_was_lost_after_it_was_paid_is_made_once_more_and_no_oftener(live: Live) -> None:
    """The client's own retries, the engine's and the broker's made four paid generations of one."""
    job = live.run(faults.close_after_work())
    assert job.error_code == "PROVIDER_CONNECTION_LOST"
    assert len(live.llm.calls) == 2
    rows = live.stage.usage(job.id)
    assert [(row["attempt_no"], row["billed"]) for row in rows] == [(1, "unknown"), (2, "unknown")]


def test_each_attempt_leaves_what_it_cost_though_only_the_last_was_of_use(open_live: LiveOpener) -> None:
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


def test_what_a_server_takes_is_learned_by_one_job_and_known_to_the_next(live: Live) -> None:
    live.run(faults.no_json_schema())
    job = live.run(faults.no_json_schema())
    assert job.lifecycle_status == "succeeded"
    formats = [call.body["response_format"]["type"] for call in live.llm.calls]
    assert formats == ["json_schema", "json_object", "json_object"]


def test_a_server_that_is_not_there_costs_nothing(open_live: LiveOpener) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        live = open_live(base_url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        job = live.run()
    assert job.error_code == "PROVIDER_UNAVAILABLE"
    assert [row["billed"] for row in live.stage.usage(job.id)] == ["no"] * 3


def test_a_server_that_sends_its_answer_in_one_piece_is_understood(live: Live) -> None:
    def whole(request: Any) -> Any:
        choice = {"index": 0, "message": {"role": "assistant", "content": "[]"}, "finish_reason": "stop"}
        return {"id": "x", "model": "m1", "choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}

    job = live.run(Reply(200, whole))
    assert job.error_code == "VALIDATION_OUTPUT_NOT_JSON"
    assert live.stage.usage(job.id)[0]["prompt_tokens"] == 7


def test_an_error_of_twenty_megabytes_is_read_to_its_status_alone(live: Live) -> None:
    job = live.run(Reply(500, {"error": {"message": "x" * 20_000_000}}))
    assert job.error_code == "PROVIDER_UNAVAILABLE"
    assert len(live.stage.kit.row(job.id)["internal_error_message"]) < 16_000


def test_a_redirect_takes_no_key_elsewhere(open_live: LiveOpener) -> None:
    with FakeLlm() as elsewhere:
        live = open_live()
        job = live.run(faults.redirect(f"{elsewhere.url}/v1/chat/completions", status=307))
        assert job.error_code == "INTERNAL_CONFIG"
        assert elsewhere.calls == []


def test_the_model_that_answered_is_the_one_that_is_priced(open_live: LiveOpener) -> None:
    live = open_live(name="deepseek")
    job = live.run(Answer(model="deepseek-flash-20260801", usage={"prompt_tokens": 1000, "completion_tokens": 0}))
    (row,) = live.stage.usage(job.id)
    assert row["model"] == "deepseek-flash-20260801"
    assert row["cost_micros"] in (150, 300), "a dated name has its model's price; twice as much at peak"
    unknown = live.run(Answer(model="m-unheard-of"))
    (row,) = live.stage.usage(unknown.id)
    assert (row["cost_micros"], row["billed"]) == (None, "yes"), "no price is not a price of nothing"


@pytest.mark.parametrize("told", [True, 12.0, "12", -3, 10**30, [7], {"n": 7}], ids=repr)
def test_a_token_count_that_is_no_count_is_unknown_and_so_is_the_cost(live: Live, told: Any) -> None:
    for name in ("prompt_tokens", "completion_tokens"):
        usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100, name: told}
        job = live.run(Answer(model="deepseek-flash", usage=usage))
        (row,) = live.stage.usage(job.id)
        assert job.lifecycle_status == "succeeded"
        assert (row[name], row["cost_micros"], row["billed"], row["estimated"]) == (None, None, "yes", False)


def test_a_count_of_cached_tokens_that_is_no_count_is_unknown(live: Live) -> None:
    details = {"prompt_tokens_details": {"cached_tokens": True}}
    job = live.run(Answer(usage={"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100, **details}))
    (row,) = live.stage.usage(job.id)
    assert (row["prompt_tokens"], row["cached_tokens"], row["cost_micros"]) == (1000, None, None)


# --- other routes, the breaker, slots ------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [faults.server_error(), faults.no_balance(), faults.bad_key(), faults.hang()])
def test_a_provider_that_fails_is_followed_by_the_next_of_the_route(open_live: LiveOpener, step: Any) -> None:
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
def test_what_may_be_paid_or_would_fail_anywhere_is_not_asked_elsewhere(open_live: LiveOpener, step: Any) -> None:
    with FakeLlm() as backup:
        live = open_live(second=backup.url)
        live.llm.script(step)
        live.stage.run(live.new())
        assert backup.calls == []


def test_jobs_wait_uncounted_while_a_providers_account_is_empty(open_live: LiveOpener) -> None:
    """One job finds out; thirty others must not burn their attempts one by one."""
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


def test_a_call_that_failed_before_its_job_is_put_off_is_closed_all_the_same(open_live: LiveOpener) -> None:
    """One route's account is empty, the other's breaker open: the job waits, and no row may stay open meanwhile."""
    with FakeLlm() as backup:
        live = open_live(second=backup.url)
        live.breaker.failed("backup.platform", exhausted=True)
        live.llm.script(faults.no_balance())
        job_id = live.new()
        assert live.stage.run(job_id) == "postponed"
        (row,) = live.stage.usage(job_id)
    assert (row["state"], row["error_code"], row["billed"]) == ("failed", "PROVIDER_ACCOUNT_EXHAUSTED", "no")


def test_a_job_that_waited_for_its_provider_too_long_fails_and_says_why(open_live: LiveOpener) -> None:
    live = open_live()
    job_id = live.new()
    live.breaker.failed("acme.platform", exhausted=True)
    words = []
    for _ in range(3):
        for hours in (2, 0.9, 0.1):  # Two before the first look, which are no wait for a provider.
            live.stage.kit.advance(hours * 3600)
            words.append(live.stage.run(job_id))
    assert words == [*["postponed", "postponed", "retry_scheduled"] * 2, "postponed", "postponed", "failed"]
    job = live.stage.kit.job(job_id)
    assert (job.error_code, job.retry_count, live.llm.calls) == ("PROVIDER_UNAVAILABLE", 2, [])


def test_calls_beyond_the_providers_limit_wait_for_one_another(open_live: LiveOpener) -> None:
    live = open_live(max_concurrent_calls=2)
    live.llm.script(Answer(delta_s=0.06))
    jobs = [live.new() for _ in range(4)]
    for delivery in [live.stage.start(job_id) for job_id in jobs]:
        assert delivery.wait(60) in ("succeeded", "postponed")
    assert {live.stage.run_to_end(job_id).lifecycle_status for job_id in jobs} == {"succeeded"}
    calls = live.llm.wait_for_calls(4, ended=True)
    spans = [(call.received_at, call.received_at + timedelta(seconds=call.ended_after_s or 0)) for call in calls]
    # A client may come in while the server still writes down that the one before it is done.
    slack = timedelta(seconds=0.5)
    assert max(sum(begin < at < end - slack for begin, end in spans) for at, _ in spans) <= 2


# --- keys ----------------------------------------------------------------------------------------------------------


def test_a_users_key_pays_for_that_users_job_alone(live: Live) -> None:
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
def test_a_users_bad_key_stops_that_user_and_nobody_else(live: Live, step: Any, code: str) -> None:
    own, _ = live.new_on("sk-user-abcdefghijklmnop")
    live.llm.script(step, key="sk-user-abcdefghijklmnop")
    assert live.stage.run_to_end(own).error_code == code
    assert live.run(Answer()).lifecycle_status == "succeeded"
    assert [call.key for call in live.llm.calls] == ["sk-user-abcdefghijklmnop", KEY], "the platform paid for nobody"


# --- what a server takes, and what it may send ---------------------------------------------------------------------


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
def test_a_server_that_takes_less_is_asked_for_less_and_the_job_goes_on(
    live: Live, message: str, field: str, asked: int
) -> None:
    job = live.run(Reply(400, {"error": {"message": message, "type": "invalid_request_error"}}), Answer())
    assert (job.lifecycle_status, job.retry_count) == ("succeeded", 0)
    first, second = live.llm.calls
    assert (first.body["max_tokens"], second.body[field]) == (8_000, asked)
    assert field == "max_tokens" or "max_tokens" not in second.body


def test_no_account_of_another_program_is_used(open_live: LiveOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own environment named another key and organization, which then paid for our calls."""
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


def test_a_server_that_wants_no_key_gets_none(open_live: LiveOpener) -> None:
    live = open_live(key=None, needs_key=False)
    assert live.run(Answer()).lifecycle_status == "succeeded"
    assert "authorization" not in live.llm.calls[0].headers


def test_an_answer_is_not_unpacked(live: Live) -> None:
    """Some kilobytes of it were gigabytes."""
    bomb = gzip.compress(b"data: " + b" " * 50_000_000)
    job = live.run(Reply(200, bomb, "text/event-stream", {"Content-Encoding": "gzip"}))
    assert job.error_code == "PROVIDER_UNAVAILABLE"
    assert {call.headers["accept-encoding"] for call in live.llm.calls} == {"identity"}


def test_a_provider_that_hangs_is_left_alone_for_a_while_at_the_limits_as_they_come(open_live: LiveOpener) -> None:
    """Its own limit on the first data was never reached within an attempt, so nothing was held against it."""
    with FakeLlm() as backup:
        live = open_live(second=backup.url, first_data_s=120, failures=1)
        job_type = live.stage.define(flashcard_generation.DEFINITION, timeout_ms=4000, delay=10)
        job = live.run(faults.hang(), job_type=job_type)
        assert (job.lifecycle_status, job.retry_count, len(backup.calls)) == ("succeeded", 0, 1)
        assert [state.word for state in live.breaker.states(["acme.platform"])] == ["open"]
