"""Dedupe keys: no two different things may meet under one key."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from aijobs.outbox.keys import MAX_LENGTH, end_key, enqueue_key


@dataclass(frozen=True)
class Job:
    id: str
    job_type: str
    user_id: str
    idempotency_key: str | None


def test_the_key_is_spelled_as_promised() -> None:
    assert enqueue_key(Job("j1", "synthetic", "u1", None), 1) == "synthetic:u1:j=j1:1"
    assert enqueue_key(Job("j1", "synthetic", "u1", "k1"), 2) == "synthetic:u1:k=k1:2"
    assert end_key("ai.job.completed", "j1") == "ai.job.completed:j1"


def test_a_users_key_that_equals_another_jobs_id_is_another_key() -> None:
    assert enqueue_key(Job("j1", "t1", "u1", None), 1) != enqueue_key(Job("j2", "t1", "u1", "j1"), 1)
    assert enqueue_key(Job("j1", "t1", "u1", None), 1) != enqueue_key(Job("j2", "t1", "u1", "j=j1"), 1)


_PARTS = st.text(alphabet=":%=kj3A25u", min_size=1, max_size=6)
_JOBS = st.builds(Job, _PARTS, _PARTS, _PARTS, st.none() | _PARTS)


def _tuple(job: Job, attempt: int) -> tuple[str, ...]:
    named = ("j", job.id) if job.idempotency_key is None else ("k", job.idempotency_key)
    return job.job_type, job.user_id, *named, str(attempt)


@given(_JOBS, st.integers(1, 12), _JOBS, st.integers(1, 12))
@example(Job("x", "t", "a:b", "c"), 1, Job("x", "t", "a", "b:c"), 1)
@example(Job("x", "t", "a%3A", "c"), 1, Job("x", "t", "a:", "c"), 1)
@example(Job("x", "t", "u", "k:1"), 1, Job("x", "t", "u", "k"), 11)
def test_two_keys_are_equal_only_where_everything_is(one: Job, first: int, other: Job, second: int) -> None:
    equal = enqueue_key(one, first) == enqueue_key(other, second)
    assert equal == (_tuple(one, first) == _tuple(other, second))


def test_a_key_too_long_for_an_index_is_a_digest_that_still_tells_attempts_apart() -> None:
    job = Job("j1", "t" * 64, "\N{GRINNING FACE}" * 255, ":" * 255)
    keys = {enqueue_key(job, attempt) for attempt in (1, 2)}
    assert len(keys) == 2
    assert all(key.startswith("sha256:") and len(key) == 71 for key in keys)
    longest = Job("j1", "t", "u", "k" * (MAX_LENGTH - len("t:u:k=:1")))
    assert len(enqueue_key(longest, 1)) == MAX_LENGTH
    assert enqueue_key(Job("j1", "t", "u", longest.idempotency_key + "k"), 1).startswith("sha256:")  # type: ignore[operator]
