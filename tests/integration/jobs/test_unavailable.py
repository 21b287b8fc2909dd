"""No job is created while no provider is available for it. A repeated request still returns its job."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from aijobs.ai.calling.breaker import scope_of
from aijobs.credentials.models import UserModelCredential
from aijobs.db.clock import ManualClock
from aijobs.errors import ApiError, InputInvalid
from aijobs.ids import new_id
from aijobs.jobs.lease import JobErrorInfo
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput, Overrides
from tests.support.databases import SqliteDatabases
from tests.support.jobs import BEGIN, Kit, open_kit
from tests.support.scratch import scratch_database

NOTES = {
    "lang": "en",
    "source": {"id": "n1", "title": "Plants"},
    "segments": [{"sid": "s1", "text": "Photosynthesis is the process by which plants make food from light. " * 4}],
}
PLATFORM = scope_of("deepseek")


@pytest.fixture
def kit(sqlite: SqliteDatabases) -> Iterator[Kit]:
    """Services with one route, to DeepSeek on the platform's key."""
    with open_kit(
        scratch_database(sqlite), clock=ManualClock(BEGIN), provider_keys={"deepseek": "sk-no-key-at-all"}
    ) as kit:
        yield kit


def ask(kit: Kit, key: str | None = None, **overrides: Any) -> AiJob:
    """Create a job for flashcards."""
    request = CreateJobInput("u1", "flashcard_generation", "note", "n1", NOTES, key, Overrides(**overrides))
    return kit.jobs.create_job(request).job


def refused(kit: Kit, act: Any) -> timedelta:
    """Check that `act` is refused and writes nothing, and return its `retry_after`."""
    before = kit.everything()
    with pytest.raises(ApiError) as found:
        act()
    assert (found.value.code, found.value.http_status) == ("PLATFORM_UNAVAILABLE", 503)
    assert kit.everything() == before
    assert found.value.retry_after is not None
    return found.value.retry_after


def break_down(kit: Kit, scope: str = PLATFORM) -> None:
    kit.services.breaker.failed(scope, exhausted=True)


def failed_job(kit: Kit) -> str:
    job = ask(kit)
    kit.lifecycle.mark_failed(kit.lock(job.id), JobErrorInfo.of("PROVIDER_UNAVAILABLE", "scripted"))
    return job.id


def credential(kit: Kit, user_id: str = "u1") -> str:
    row = UserModelCredential(
        user_id=user_id,
        mode="user_deepseek_key",
        label="mine",
        last_four="abcd",
        fingerprint="f" * 64,
        key_id="k1",
        ciphertext=b"sealed",
        created_at=BEGIN,
    )
    with kit.database.transaction() as session:
        session.add(row)
        session.flush()
        return row.id


def test_new_job_is_refused_until_the_breaker_allows_a_probe(kit: Kit) -> None:
    break_down(kit)
    assert timedelta(seconds=300) <= refused(kit, lambda: ask(kit)) <= timedelta(seconds=360)
    kit.services.breaker._store.advance(300)  # type: ignore[attr-defined]
    assert ask(kit).lifecycle_status == "queued"


def test_repeated_key_returns_its_job_while_no_provider_is_available(kit: Kit) -> None:
    job = ask(kit, "same key")
    break_down(kit)
    assert ask(kit, "same key").id == job.id
    refused(kit, lambda: ask(kit, "another key"))


def test_users_own_key_and_platform_key_have_separate_breakers(kit: Kit) -> None:
    mine = credential(kit)
    own = {"credential_mode": "user_deepseek_key", "credential_id": mine}
    break_down(kit)
    assert ask(kit, **own).credential_id == mine
    kit.services.breaker.reset(PLATFORM)
    break_down(kit, scope_of("deepseek", mine))
    refused(kit, lambda: ask(kit, **own))
    assert ask(kit).credential_mode == "platform_key"


def test_another_users_credential_is_unknown_even_if_its_breaker_is_open(kit: Kit) -> None:
    theirs = credential(kit, "u2")
    break_down(kit, scope_of("deepseek", theirs))
    before = kit.everything()
    faults = []
    for credential_id in (theirs, new_id()):
        with pytest.raises(InputInvalid) as found:
            ask(kit, credential_mode="user_deepseek_key", credential_id=credential_id)
        faults.append(found.value.by_field())
    assert faults == [{"credentialId": "is no credential of this user"}] * 2
    assert kit.everything() == before


def test_type_without_provider_calls_is_never_refused(kit: Kit) -> None:
    break_down(kit)
    assert kit.create().created


def test_retry_is_refused_while_no_provider_is_available_and_works_later(kit: Kit) -> None:
    job_id = failed_job(kit)
    break_down(kit)
    refused(kit, lambda: kit.jobs.retry(job_id, "operator:x"))
    kit.services.breaker.reset(PLATFORM)
    child = kit.jobs.retry(job_id, "operator:x")
    assert (child.created, child.job.parent_job_id) == (True, job_id)
    break_down(kit)
    again = kit.jobs.retry(job_id, "operator:x")
    assert (again.created, again.job.id) == (False, child.job.id)


def test_retry_that_inherits_an_output_needs_no_provider(kit: Kit) -> None:
    job_id = failed_job(kit)
    with kit.database.transaction() as session:
        session.execute(
            update(AiJob).where(AiJob.id == job_id).values(validated_output={"cards": []}, output_hash="0" * 64)
        )
    break_down(kit)
    assert kit.jobs.retry(job_id, "operator:x").created


def test_not_retryable_comes_before_unavailable(kit: Kit) -> None:
    job = ask(kit)
    break_down(kit)
    with pytest.raises(ApiError) as found:
        kit.jobs.retry(job.id, "operator:x")
    assert (found.value.code, found.value.details) == ("JOB_NOT_RETRYABLE", {"reason": "not_final"})


def test_one_available_route_is_enough(sqlite: SqliteDatabases, tmp_path: Any) -> None:
    providers = tmp_path / "providers.toml"
    providers.write_text(
        '[provider.other]\nbase_url = "https://other.test"\nmodels = ["m"]\nkey = "none"\n'
        '[routes]\ndefault = ["deepseek/deepseek-flash", "other/m"]\n',
        encoding="utf-8",
    )
    with open_kit(
        scratch_database(sqlite),
        clock=ManualClock(BEGIN),
        providers=str(providers),
        provider_keys={"deepseek": "sk-no-key-at-all"},
    ) as kit:
        break_down(kit)
        assert ask(kit).lifecycle_status == "queued"
        for _ in range(kit.services.settings.breaker_failures):
            kit.services.breaker.failed(scope_of("other"))
        assert refused(kit, lambda: ask(kit)) < timedelta(seconds=40)


def test_built_in_provider_is_always_available(sqlite_kit: Kit) -> None:
    break_down(sqlite_kit)
    break_down(sqlite_kit, scope_of("local"))
    assert ask(sqlite_kit).lifecycle_status == "queued"
