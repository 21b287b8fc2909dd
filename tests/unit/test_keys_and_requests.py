"""Dedupe keys and request hashes: different things never share one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aijobs.jobs.requests import CreateJobInput, Overrides, is_same_request, request_hash
from aijobs.outbox.keys import MAX_LENGTH, end_key, enqueue_key
from aijobs.settings import KeyRing
from tests.unit.test_canonical import same, values

KEYS = KeyRing((("k1", b"m" * 32),))


@dataclass(frozen=True)
class Job:
    """The fields of a dedupe key."""

    id: str
    job_type: str
    user_id: str
    idempotency_key: str | None


# Few characters, among them all separators of the key, so that collisions are likely.
parts = st.text("a:%jk=13A", min_size=1, max_size=6) | st.text(min_size=1, max_size=300).filter(
    lambda s: s.isprintable()
)
named = st.builds(Job, parts, parts, parts, st.none() | parts)
attempts = st.integers(1, 99)


def _tuple(job: Job, attempt: int) -> tuple[Any, ...]:
    who = ("j", job.id) if job.idempotency_key is None else ("k", job.idempotency_key)
    return (job.job_type, job.user_id, *who, attempt)


@given(named, attempts, named, attempts)
@example(Job("x", "t", "a:b", "c"), 1, Job("x", "t", "a", "b:c"), 1)
@example(Job("x", "t", "a%3A", "c"), 1, Job("x", "t", "a:", "c"), 1)
@example(Job("x", "t", "u", "k:1"), 1, Job("x", "t", "u", "k"), 11)
@example(Job("j1", "t", "u", None), 1, Job("j2", "t", "u", "j1"), 1)
@example(Job("j1", "t", "u", None), 1, Job("j2", "t", "u", "j=j1"), 1)
def test_two_events_share_a_key_only_if_they_ask_for_the_same_attempt(
    one: Job, first: int, other: Job, second: int
) -> None:
    alike = _tuple(one, first) == _tuple(other, second)
    assert (enqueue_key(one, first) == enqueue_key(other, second)) == alike


@given(named, attempts)
def test_key_fits_its_column(job: Job, attempt: int) -> None:
    assert len(enqueue_key(job, attempt)) <= MAX_LENGTH


def test_key_has_type_user_name_and_attempt() -> None:
    job = Job("id1", "synthetic", "u:1%", None)
    assert enqueue_key(job, 2) == "synthetic:u%3A1%25:j=id1:2"
    assert enqueue_key(replace(job, idempotency_key="a:b"), 2) == "synthetic:u%3A1%25:k=a%3Ab:2"
    assert end_key("ai.job.failed", "id1") == "ai.job.failed:id1"


def test_key_that_is_too_long_is_a_unique_digest() -> None:
    job = Job("id1", "synthetic", ":" * 255, "k" * 255)
    keys = {enqueue_key(job, n) for n in (1, 2)} | {enqueue_key(replace(job, user_id="%" * 255), 1)}
    assert len(keys) == 3
    assert all(key.startswith("sha256:") for key in keys)
    exact = Job("i", "t", "u", "k" * (MAX_LENGTH - len("t:u:k=:1")))
    assert len(enqueue_key(exact, 1)) == MAX_LENGTH
    assert enqueue_key(exact, 10).startswith("sha256:")


def request(content: Any, **changes: Any) -> CreateJobInput:
    """Return a request with this content."""
    return replace(CreateJobInput("u1", "synthetic", "note", "n1", {"a": content}), **changes)


@given(values, values)
def test_two_requests_share_a_hash_only_if_their_input_is_equal(one: Any, other: Any) -> None:
    assert (request_hash(request(one), KEYS) == request_hash(request(other), KEYS)) == same(one, other)
    assert is_same_request(request(one), request_hash(request(other), KEYS), KEYS) == same(one, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_id": "n2"},
        {"target_type": "page"},
        {"overrides": Overrides(priority=1)},
        {"overrides": Overrides(credential_mode="platform_key")},
        {"overrides": Overrides(credential_id="c")},
        {"overrides": Overrides(prompt_version="v1")},
        {"overrides": Overrides(output_schema_version="1")},
    ],
)
def test_request_hash_covers_target_and_each_override(changes: dict[str, Any]) -> None:
    assert not is_same_request(request(1, **changes), request_hash(request(1), KEYS), KEYS)


def test_request_hash_does_not_cover_user_type_and_key() -> None:
    for changes in ({"user_id": "u2"}, {"job_type": "other"}, {"idempotency_key": "k"}):
        assert is_same_request(request(1, **changes), request_hash(request(1), KEYS), KEYS)


def test_request_hash_matches_nothing_without_its_message_key() -> None:
    stored = request_hash(request(1), KEYS)
    assert stored is not None
    assert stored.startswith("k1:")
    assert len(stored) <= 96
    rotated = KeyRing((("k2", b"n" * 32), *KEYS.keys))
    assert is_same_request(request(1), stored, rotated)
    assert not is_same_request(request(1), stored, KeyRing((("k2", b"n" * 32),)))
    assert not is_same_request(request(1), stored, KeyRing((("k1", b"n" * 32),)))
    for broken in (None, "", "k1", "k1:", "k1:zz", ":"):
        assert not is_same_request(request(1), broken, KEYS)
