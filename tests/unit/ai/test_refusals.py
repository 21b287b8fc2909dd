"""What a server's error means, and when it wants us back: read from status, headers and body, and never quoted."""

from __future__ import annotations

import json
from datetime import timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.ai.provider import ConstraintRefused
from aijobs.ai.providers.openai_compatible.refusals import ServerError, failure_of, retry_after, stream_failure
from aijobs.clock import utc_now


def error(status: int, body: Any = "", **headers: str) -> ServerError:
    raw = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    return ServerError(status, headers, raw)


def code(status: int, body: Any = "", *, own_key: bool = False, constrained: bool = True) -> str:
    return failure_of(error(status, body), own_key=own_key, constrained=constrained).code


@pytest.mark.parametrize(
    ("status", "platform", "own"),
    [
        (401, "CREDENTIAL_PLATFORM_INVALID", "CREDENTIAL_INVALID"),
        (403, "CREDENTIAL_PLATFORM_INVALID", "CREDENTIAL_INVALID"),
        (402, "PROVIDER_ACCOUNT_EXHAUSTED", "CREDENTIAL_INSUFFICIENT_BALANCE"),
    ],
)
def test_whose_key_was_refused_decides_who_is_told(status: int, platform: str, own: str) -> None:
    assert code(status) == platform
    assert code(status, own_key=True) == own


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "no", "type": "insufficient_quota", "code": "insufficient_quota"}},
        {"error": {"message": "You exceeded your current quota, please check your plan"}},
        {"message": "Insufficient Balance", "code": 402},
    ],
)
def test_a_429_that_never_gets_better_is_not_tried_again(body: Any) -> None:
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
def test_a_400_that_speaks_of_safety_is_no_fault_of_the_request(body: Any) -> None:
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
def test_a_prompt_that_is_too_long_is_told_from_other_400s(message: str) -> None:
    assert code(400, {"error": {"message": message}}) == "VALIDATION_INPUT_TOO_LARGE"
    assert code(400, {"object": "error", "message": message, "code": 400}) == "VALIDATION_INPUT_TOO_LARGE"


def test_a_constraint_that_is_refused_is_given_up_only_where_one_was_asked_for() -> None:
    refused = error(400, {"error": {"message": "This response_format type is unavailable now"}})
    assert isinstance(failure_of(refused, own_key=False, constrained=True), ConstraintRefused)
    plain = failure_of(refused, own_key=False, constrained=False)
    assert (type(plain).__name__, plain.code) == ("CallFailed", "INTERNAL_CONFIG")


@pytest.mark.parametrize(
    ("status", "billed"), [(400, "no"), (429, "no"), (503, "no"), (529, "no"), (500, "unknown"), (504, "unknown")]
)
def test_what_may_have_been_done_behind_a_gateway_is_not_said_to_be_free(status: int, billed: str) -> None:
    assert failure_of(error(status), own_key=False, constrained=True).facts.billed == billed


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
def test_when_to_come_back_is_read_or_taken_as_unsaid(headers: dict[str, str], seconds: float | None) -> None:
    found = retry_after(headers)
    assert found == (None if seconds is None else timedelta(seconds=seconds))


def test_a_date_to_come_back_counts_from_now_and_one_that_has_passed_is_now() -> None:
    ahead = retry_after({"retry-after": format_datetime(utc_now() + timedelta(seconds=60), usegmt=True)})
    assert ahead is not None
    assert timedelta(seconds=55) < ahead <= timedelta(seconds=60)
    assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == timedelta(0)


@given(
    status=st.sampled_from([200, 302, 400, 401, 402, 403, 404, 408, 413, 422, 429, 500, 502, 503, 529]),
    text=st.text(),
    place=st.sampled_from(["message", "type", "code", "param", "detail"]),
)
def test_nothing_of_a_body_is_ever_told(status: int, text: str, place: str) -> None:
    mark = "sk-Canary1234" + text
    for body in ({"error": {place: mark}}, {place: mark}, {"error": mark}, mark, [mark]):
        failed = failure_of(error(status, body), own_key=False, constrained=True)
        assert "Canary" not in f"{failed} {failed.internal} {failed.faults} {failed.facts}"


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_an_error_of_some_kind(raw: bytes) -> None:
    assert failure_of(error(500, raw), own_key=False, constrained=True).code == "PROVIDER_UNAVAILABLE"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"message": "oops"}, "PROVIDER_STREAM_BROKEN"),
        ({"message": "Rate limit", "code": 429}, "PROVIDER_RATE_LIMITED"),
        ({"message": "Content Exists Risk", "code": 400}, "CONTENT_SAFETY_PROVIDER"),
        ("text", "PROVIDER_STREAM_BROKEN"),
        (None, "PROVIDER_STREAM_BROKEN"),
    ],
)
def test_an_error_in_mid_stream_may_have_been_billed(body: Any, expected: str) -> None:
    failed = stream_failure(body, own_key=False)
    assert (failed.code, failed.facts.billed) == (expected, "unknown")
