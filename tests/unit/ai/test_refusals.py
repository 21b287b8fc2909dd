"""The meaning of a server's error, from status, headers and body, which are never quoted."""

from __future__ import annotations

import json
from datetime import timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.ai.providers.openai_compatible.refusals import (
    ServerError,
    failure_of,
    retry_after,
    stream_failure,
    what_it_says,
)
from aijobs.ai.providers.openai_compatible.terms import Terms
from aijobs.clock import utc_now


def error(status: int, body: Any = "", **headers: str) -> ServerError:
    raw = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    return ServerError(status, headers, raw)


def terms(**changes: Any) -> Terms:
    return Terms(**{"json_mode": "json_schema", "tokens_name": "max_tokens", **changes})


def code(status: int, body: Any = "", *, own_key: bool = False) -> str:
    return failure_of(error(status, body), own_key=own_key).code


@pytest.mark.parametrize(
    ("status", "platform", "own"),
    [
        (401, "CREDENTIAL_PLATFORM_INVALID", "CREDENTIAL_INVALID"),
        (403, "CREDENTIAL_PLATFORM_INVALID", "CREDENTIAL_INVALID"),
        (402, "PROVIDER_ACCOUNT_EXHAUSTED", "CREDENTIAL_INSUFFICIENT_BALANCE"),
    ],
)
def test_code_of_a_refused_key_depends_on_its_owner(status: int, platform: str, own: str) -> None:
    assert code(status) == platform
    assert code(status, own_key=True) == own


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "no", "type": "insufficient_quota", "code": "insufficient_quota"}},
        {"error": {"message": "no", "type": "billing_hard_limit_reached"}},
        {"message": "Insufficient Balance", "code": 402},
    ],
)
def test_status_429_for_an_exhausted_account_is_permanent(body: Any) -> None:
    assert code(429, body) == "PROVIDER_ACCOUNT_EXHAUSTED"
    assert code(429, body, own_key=True) == "CREDENTIAL_INSUFFICIENT_BALANCE"


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "Content Exists Risk"}},
        {"error": {"message": "x", "code": "content_filter"}},
        {"error": {"message": "Your request was rejected as a result of our safety system."}},
    ],
)
def test_status_400_about_safety_is_a_safety_refusal(body: Any) -> None:
    assert code(400, body) == "CONTENT_SAFETY_PROVIDER"


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens.",
        "The decoder prompt (length 9) is longer than the maximum model length of 8.",
        "prompt is too long: 9 tokens > 8 maximum",
        "the request exceeds the available context size, try increasing it",
        "Please reduce the length of the messages.",
    ],
)
def test_status_400_about_length_means_too_large_input(message: str) -> None:
    assert code(400, {"error": {"message": message}}) == "VALIDATION_INPUT_TOO_LARGE"
    assert code(400, {"object": "error", "message": message, "code": 400}) == "VALIDATION_INPUT_TOO_LARGE"


@pytest.mark.parametrize(
    "message",
    [
        "Rate limit reached for gpt-5 on requests per min (RPM): Limit 3, Used 3. Please try again in 20s. You can "
        "increase your rate limit by adding a payment method to your account at /account/billing.",
        "You exceeded your current quota, please check your plan and billing details: requests per minute.",
    ],
)
def test_rate_limit_is_never_taken_for_an_exhausted_account(message: str) -> None:
    """An earlier defect: it failed the job for good, and kept the provider out for minutes."""
    body = {"error": {"message": message, "type": "requests", "code": "rate_limit_exceeded"}}
    failed = failure_of(error(429, body, **{"retry-after": "20"}), own_key=True)
    assert (failed.code, failed.retry_after) == ("PROVIDER_RATE_LIMITED", timedelta(seconds=20))


@pytest.mark.parametrize(
    "repeated",
    ["lessons on English grammar", "the content_policy of the Ming", "content exists risk", "a context window in Word"],
)
def test_notes_quoted_in_an_error_do_not_change_its_code(repeated: str) -> None:
    fault = {"type": "value_error", "loc": ["body", "messages"], "msg": "is not valid", "input": repeated}
    assert code(422, {"detail": [fault]}) == "INTERNAL_CONFIG"
    assert code(400, {"error": {"message": "x" * 400 + repeated}}) == "INTERNAL_CONFIG"
    assert terms().after(what_it_says(error(422, {"detail": [fault]}).body).text, 8_000) is None


@pytest.mark.parametrize(
    ("status", "billed"), [(400, "no"), (429, "no"), (503, "no"), (529, "no"), (500, "unknown"), (504, "unknown")]
)
def test_error_of_a_gateway_may_be_billed(status: int, billed: str) -> None:
    assert failure_of(error(status), own_key=False).facts.billed == billed


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Mon, 99 Foo 2026 00:00:00 GMT"}, None),
        ({"retry-after": "1" * 400}, 86_400),
        ({"retry-after-ms": "nan"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read_or_ignored_if_invalid(headers: dict[str, str], seconds: float | None) -> None:
    found = retry_after(headers)
    assert found == (None if seconds is None else timedelta(seconds=seconds))


def test_retry_after_date_is_relative_to_now_and_never_negative() -> None:
    ahead = retry_after({"retry-after": format_datetime(utc_now() + timedelta(seconds=60), usegmt=True)})
    assert ahead is not None
    assert timedelta(seconds=55) < ahead <= timedelta(seconds=60)
    assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == timedelta(0)


@given(
    status=st.sampled_from([200, 302, 400, 401, 402, 403, 404, 408, 413, 422, 429, 500, 502, 503, 529]),
    text=st.text(),
    place=st.sampled_from(["message", "type", "code", "param", "detail"]),
)
def test_body_of_an_error_is_never_quoted(status: int, text: str, place: str) -> None:
    mark = "sk-Canary1234" + text
    for body in ({"error": {place: mark}}, {place: mark}, {"error": mark}, mark, [mark]):
        failed = failure_of(error(status, body), own_key=False)
        assert "Canary" not in f"{failed} {failed.internal} {failed.faults} {failed.facts}"


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_an_error_with_a_code(raw: bytes) -> None:
    assert failure_of(error(500, raw), own_key=False).code == "PROVIDER_UNAVAILABLE"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"message": "oops"}, "PROVIDER_STREAM_BROKEN"),
        ({"message": "Rate limit", "code": 429}, "PROVIDER_RATE_LIMITED"),
        ({"message": "Rate limit", "code": "rate_limit_exceeded"}, "PROVIDER_RATE_LIMITED"),
        ({"message": "no", "type": "insufficient_quota"}, "PROVIDER_ACCOUNT_EXHAUSTED"),
        ({"message": "busy", "type": "overloaded_error"}, "PROVIDER_STREAM_BROKEN"),
        ({"message": "Content Exists Risk", "code": 400}, "CONTENT_SAFETY_PROVIDER"),
        ("text", "PROVIDER_STREAM_BROKEN"),
        (None, "PROVIDER_STREAM_BROKEN"),
    ],
)
def test_error_in_mid_stream_may_be_billed(body: Any, expected: str) -> None:
    failed = stream_failure(body, own_key=False)
    assert (failed.code, failed.facts.billed) == (expected, "unknown")


# --- terms that a server accepts -----------------------------------------------------------------------------------


def test_constraints_are_relaxed_in_order() -> None:
    said = "this response_format type is unavailable now"
    first = terms().after(said, 8_000)
    assert first == terms(json_mode="json_object")
    assert first.after(said, 8_000) == terms(json_mode="prompt")
    assert terms(json_mode="prompt").after(said, 8_000) is None


def test_newer_parameter_for_the_token_limit_is_learned() -> None:
    said = "unsupported parameter: 'max_tokens' is not supported with this model. use 'max_completion_tokens' instead."
    learned = terms().after(said, 8_000)
    assert learned == terms(tokens_name="max_completion_tokens")
    assert learned.after(said, 8_000) is None


@pytest.mark.parametrize(
    "said",
    [
        "max_tokens is too large: 32000. this model supports at most 16384 completion tokens, and you provided 32000.",
        "invalid max_tokens value, the valid range of max_tokens is [1, 16384]",
        "max_tokens must be less than or equal to 16384",
    ],
)
def test_token_limit_of_a_server_is_learned(said: str) -> None:
    learned = terms().after(said, 32_000)
    assert learned is not None
    assert (learned.most_tokens, learned.room(32_000, "")) == (16_384, 16_384)
    assert learned.after(said, 16_384) is None, "a refusal within the limit has another reason"


def test_small_context_reduces_the_token_limit_of_the_answer() -> None:
    said = (
        "this model's maximum context length is 8192 tokens. however, you requested 9000 tokens (1000 in the messages, "
        "8000 in the completion). please reduce the length of the messages or completion."
    )
    learned = terms().after(said, 8_000)
    assert learned is not None
    assert learned.room(8_000, "") == 8192 - 1000 - 64
    assert learned.for_others.room(8_000, "x" * 4000) == 8192 - 1000 - 64, "the next prompt has another length"
    too_long = said.replace("1000 in", "9000 in")
    assert terms().after(too_long, 8_000) is None
    assert code(400, {"error": {"message": too_long}}) == "VALIDATION_INPUT_TOO_LARGE"
