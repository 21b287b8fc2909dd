"""The retry rules: which error codes are retried, how often, and after what wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest

from aijobs.definitions.definition import JobDefinition, RetryBackoff
from aijobs.engine.retry import wait_before_retry
from aijobs.errors import CODES, JobError
from aijobs.job_types.synthetic import DEFINITION

# Written out instead of read from the table that these tests check.
BACKOFF = {
    "PROVIDER_RATE_LIMITED",
    "PROVIDER_UNAVAILABLE",
    "PROVIDER_TIMEOUT",
    "PROVIDER_STREAM_BROKEN",
    "VALIDATION_OUTPUT_NOT_JSON",
    "VALIDATION_OUTPUT_SCHEMA",
    "VALIDATION_OUTPUT_SEMANTICS",
    "VALIDATION_OUTPUT_TOO_LARGE",
    "VALIDATION_TRUNCATED",
    "PROVIDER_OF_A_PLUG_IN",
    "VALIDATION_OF_A_PLUG_IN",
}
ONCE = {
    "PROVIDER_CONNECTION_LOST",
    "PROVIDER_EMPTY_OUTPUT",
    "INTERNAL_ERROR",
    "INTERNAL_PROJECTION",
    "INTERNAL_DATABASE",
    "INTERNAL_OF_A_PLUG_IN",
    "NAMED_LIKE_NOTHING_ELSE",
}
BY_DEFINITION = {"TIMEOUT"}
NEVER = {"CONTENT_SAFETY_OF_A_PLUG_IN", "CREDENTIAL_OF_A_PLUG_IN"} | {
    code for code in CODES if code not in BACKOFF | ONCE | BY_DEFINITION
}


def definition(*, delay: int = 1000, abort_strategy: str = "fail") -> JobDefinition:
    changed = replace(DEFINITION.execution, retry_backoff=RetryBackoff(delay), abort_strategy=abort_strategy)
    return replace(DEFINITION, execution=changed)


def wait(
    code: str, *before: str, retries: int | None = None, most: int = 5, strategy: str = "fail"
) -> timedelta | None:
    """Return the wait after `code` for a job that was already retried for each of `before`."""
    return wait_before_retry(
        JobError(code),
        definition(abort_strategy=strategy),
        retry_count=len(before) if retries is None else retries,
        max_retries=most,
        retried=Counter(before),
    )


def test_table_has_every_code_that_is_never_retried() -> None:
    assert {
        "CANCELLED",
        "PROVIDER_ACCOUNT_EXHAUSTED",
        "VALIDATION_INPUT_TOO_LARGE",
        "VALIDATION_NOTHING_TO_EXTRACT",
        "CONTENT_SAFETY_BLOCKED",
        "CREDENTIAL_INVALID",
        "CREDENTIAL_NOT_FOUND",
        "CREDENTIAL_INSUFFICIENT_BALANCE",
        "INTERNAL_CONFIG",
        "INTERNAL_SNAPSHOT_MISSING",
        "INTERNAL_WORKER_LOST",
        "INTERNAL_NOT_DISPATCHED",
        "INTERNAL_UNKNOWN_JOB_TYPE",
    } <= NEVER


@pytest.mark.parametrize("code", sorted(NEVER))
def test_permanent_code_is_never_retried(code: str) -> None:
    assert wait(code, strategy="retry") is None


@pytest.mark.parametrize("code", sorted(BACKOFF))
def test_temporary_code_is_retried_up_to_max_retries(code: str) -> None:
    assert wait(code, *[code] * 4) is not None
    assert wait(code, *[code] * 5) is None
    assert wait(code, most=0) is None


@pytest.mark.parametrize("code", sorted(ONCE))
def test_once_code_is_retried_once(code: str) -> None:
    assert wait(code) is not None
    assert wait(code, code) is None
    assert wait(code, most=0) is None, "once never exceeds max_retries"


INTERNAL = sorted(code for code in ONCE if not code.startswith("PROVIDER_"))


@pytest.mark.parametrize("code", INTERNAL)
@pytest.mark.parametrize("before", INTERNAL)
def test_internal_codes_share_one_retry(code: str, before: str) -> None:
    assert wait(code, before) is None
    assert wait(code, "PROVIDER_CONNECTION_LOST", "VALIDATION_TRUNCATED") is not None, "others don't use it up"


def test_each_provider_code_has_its_own_single_retry() -> None:
    assert wait("PROVIDER_CONNECTION_LOST", "PROVIDER_EMPTY_OUTPUT", "INTERNAL_ERROR") is not None


def test_timeout_is_retried_if_the_definition_says_so() -> None:
    assert wait("TIMEOUT", strategy="fail") is None
    assert wait("TIMEOUT", strategy="retry", retries=4) is not None
    assert wait("TIMEOUT", strategy="retry", retries=5) is None


def test_wait_doubles_with_each_retry() -> None:
    waits = [wait("PROVIDER_UNAVAILABLE", retries=n) for n in range(4)]
    assert waits == [timedelta(seconds=s) for s in (1, 2, 4, 8)]


@pytest.mark.parametrize(("asked", "waited"), [(30, 30), (1, 4)])
def test_provider_can_lengthen_the_wait_but_not_shorten_it(asked: int, waited: int) -> None:
    error = JobError("PROVIDER_RATE_LIMITED", retry_after=timedelta(seconds=asked))
    found = wait_before_retry(error, definition(), retry_count=2, max_retries=3, retried={})
    assert found == timedelta(seconds=waited)
