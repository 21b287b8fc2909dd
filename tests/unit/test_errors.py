"""The table of error codes: HTTP statuses, retry rules and messages."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from aijobs.errors import CODES, ApiError, ErrorCode, InputInvalid, JobError, Retried, describe, register_code

HTTP = {
    "BAD_REQUEST": 400,
    "UNAUTHORIZED": 401,
    "FORBIDDEN": 403,
    "JOB_NOT_FOUND": 404,
    "NOT_FOUND": 404,
    "METHOD_NOT_ALLOWED": 405,
    "JOB_NOT_CANCELLABLE": 409,
    "JOB_ALREADY_CANCELLED": 409,
    "JOB_NOT_RETRYABLE": 409,
    "IDEMPOTENCY_KEY_REUSED": 409,
    "PAYLOAD_TOO_LARGE": 413,
    "UNSUPPORTED_MEDIA_TYPE": 415,
    "INPUT_INVALID": 422,
    "TOO_MANY_JOBS": 429,
    "QUOTA_EXCEEDED": 429,
    "RATE_LIMITED": 429,
    "PLATFORM_UNAVAILABLE": 503,
    "SERVICE_BUSY": 503,
    "INTERNAL_ERROR": 500,
}


def test_api_codes_have_their_documented_status() -> None:
    assert {code: describe(code).http for code in HTTP} == HTTP
    assert set(HTTP) <= set(CODES)


@pytest.mark.parametrize("code", sorted(CODES))
def test_code_has_messages_in_both_languages_without_internals(code: str) -> None:
    entry = CODES[code]
    assert re.fullmatch(r"[A-Z][A-Z_]{1,63}", code), "it fits its column"
    assert entry.en.isascii()
    assert re.search(r"[\u4e00-\u9fff]", entry.zh)
    assert len(entry.en) <= 500
    assert not re.search(r"https?:|/[a-z]+/|Traceback|sk-|localhost|%s|\{", entry.en + entry.zh)


@pytest.mark.parametrize("language", ["zh", "zh-CN", "zh-TW", "zh_Hans"])
def test_chinese_locales_get_chinese_and_all_others_english(language: str) -> None:
    entry = describe("TIMEOUT")
    assert entry.message(language) == entry.zh
    assert entry.message() == entry.message("de") == entry.message("") == entry.en


@pytest.mark.parametrize(
    ("code", "retried"),
    [
        ("PROVIDER_NEW", Retried.BACKOFF),
        ("VALIDATION_NEW", Retried.REPROMPT),
        ("CONTENT_SAFETY_NEW", Retried.NEVER),
        ("CREDENTIAL_NEW", Retried.NEVER),
        ("INTERNAL_NEW", Retried.ONCE),
        ("SOMETHING_ELSE", Retried.ONCE),
        ("TIMEOUT", Retried.BY_DEFINITION),
        ("CANCELLED", Retried.NEVER),
        ("PROVIDER_ACCOUNT_EXHAUSTED", Retried.NEVER),
        ("INTERNAL_WORKER_LOST", Retried.NEVER),
    ],
)
def test_code_takes_precedence_over_its_prefix(code: str, retried: Retried) -> None:
    entry = describe(code)
    assert (entry.code, entry.retried) == (code, retried)
    assert entry.en
    assert entry.zh


def test_plug_in_may_add_a_code_but_not_change_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aijobs.errors.CODES", dict(CODES))
    mine = ErrorCode("PROVIDER_MINE", 500, Retried.NEVER, "Mine.", "我的。")
    register_code(mine)
    register_code(mine)
    assert describe("PROVIDER_MINE") is mine
    with pytest.raises(ValueError, match="PROVIDER_MINE"):
        register_code(ErrorCode("PROVIDER_MINE", 500, Retried.ONCE, "Mine.", "我的。"))


def test_errors_have_status_details_and_faults() -> None:
    assert ApiError("TOO_MANY_JOBS").http_status == 429
    assert ApiError("TOO_MANY_JOBS").details is None
    invalid = InputInvalid([("a.b", "is wrong")])
    assert (invalid.code, invalid.http_status) == ("INPUT_INVALID", 422)
    assert invalid.details == {"fields": [{"field": "a.b", "message": "is wrong"}]}
    assert JobError("X", faults=[str(n) for n in range(9)]).faults == ("0", "1", "2", "3", "4")


LONGEST = "PROVIDER_" + "X" * 55


@pytest.mark.parametrize("code", [LONGEST + "X", "", "lower", "WITH SPACE", "É", "9TH", "_X", "A\n", "A" * 200])
def test_code_that_does_not_fit_its_column_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="does not match"):
        register_code(ErrorCode(code, 500, Retried.NEVER, "Mine.", "我的。"))


@pytest.mark.parametrize(("en", "zh"), [("x" * 501, "我"), ("x", "我" * 501), ("", "我"), ("x", "")])
def test_message_that_does_not_fit_its_column_is_refused(en: str, zh: str) -> None:
    with pytest.raises(ValueError, match="1–500"):
        register_code(ErrorCode("PROVIDER_MINE", 500, Retried.NEVER, en, zh))


def test_retry_after_of_a_provider_is_limited_to_an_hour() -> None:
    assert JobError("X", retry_after=timedelta(days=300)).retry_after == timedelta(hours=1)
    assert JobError("X", retry_after=timedelta(seconds=7)).retry_after == timedelta(seconds=7)
    assert JobError("X").retry_after is None
