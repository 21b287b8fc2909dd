"""One user, one job type, one key: one job, for one request."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from aijobs.definitions.definition import Credential, Input
from aijobs.errors import ApiError, InputInvalid
from aijobs.ids import new_id
from aijobs.job_types.synthetic import DEFINITION
from aijobs.jobs.models import AiJob, JobTombstone
from aijobs.jobs.requests import CreatedJob
from aijobs.settings import KeyRing
from tests.support.jobs import BEGIN, KEYS, Kit, open_kit, race

NEW = b"n" * 32
OLD_KEY = KEYS.current


def deep(levels: int) -> list[Any]:
    """Return a list nested so many levels deep."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def _refusal(kit: Kit, request: Any) -> tuple[str, dict[str, Any]]:
    before = kit.everything()
    with pytest.raises(ApiError) as refused:
        kit.jobs.create_job(request)
    assert kit.everything() == before
    return refused.value.code, refused.value.details or {}


def test_key_used_twice_is_one_job_one_event_one_message(kit: Kit) -> None:
    first = kit.create(idempotency_key="k")
    before = kit.everything()
    second = kit.create(idempotency_key="k")
    assert (first.created, second.created, second.job.id) == (True, False, first.job.id)
    assert kit.everything() == before
    assert kit.broker.pending_count("ai-interactive") == 1


def test_without_a_key_each_call_is_a_new_job(kit: Kit) -> None:
    assert kit.new_job().id != kit.new_job().id


def test_twenty_creates_at_once_with_one_key_create_one_job(live_kit: Kit) -> None:
    kit = live_kit
    outcomes = race(*[partial(kit.create, idempotency_key="k")] * 20)
    assert all(isinstance(one, CreatedJob) for one in outcomes), outcomes
    assert len({one.job.id for one in outcomes}) == 1
    assert [one.created for one in outcomes].count(True) == 1
    assert kit.counts() == {
        "ai_jobs": 1,
        "ai_job_snapshots": 1,
        "ai_job_events": 1,
        "outbox_events": 1,
        "quota_usage": 1,
    }
    assert kit.broker.pending_count("ai-interactive") == 1


def test_two_processes_with_one_key_and_two_requests_have_one_winner(live_kit: Kit) -> None:
    kit = live_kit
    with open_kit(kit.url) as second:
        for n in range(8):
            mine, theirs = race(
                partial(kit.create, target_id="a", idempotency_key=f"k{n}"),
                partial(second.create, target_id="b", idempotency_key=f"k{n}"),
            )
            won, lost = (mine, theirs) if isinstance(mine, CreatedJob) else (theirs, mine)
            assert won.created
            assert isinstance(lost, ApiError)
            assert lost.code == "IDEMPOTENCY_KEY_REUSED"
            assert lost.details == {"jobId": won.job.id, "reason": "other_request"}


def test_unique_conflict_returns_the_winner(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The find before the transaction and the one under the lock miss the winner; the unique index doesn't."""
    winner = kit.new_job(idempotency_key="k")
    reads = []
    real = kit.jobs._existing

    def blind_twice(*arguments: Any) -> AiJob | None:
        reads.append(1)
        return None if len(reads) <= 2 else real(*arguments)

    monkeypatch.setattr(kit.jobs, "_existing", blind_twice)
    before = kit.everything()
    again = kit.create(idempotency_key="k")
    assert (again.created, again.job.id, len(reads)) == (False, winner.id, 3)
    reads.clear()
    with pytest.raises(ApiError, match="IDEMPOTENCY_KEY_REUSED"):
        kit.create(idempotency_key="k", target_id="another")
    assert kit.everything() == before


def test_order_of_keys_and_notation_of_numbers_do_not_change_the_request(kit: Kit) -> None:
    first = kit.create({"output": {"a": 1, "b": {"c": [1, 2.0], "d": "x"}}, "artifacts": 1}, idempotency_key="k")
    again = kit.create({"artifacts": 1, "output": {"b": {"d": "x", "c": [1.0, 2]}, "a": 1}}, idempotency_key="k")
    assert again.job.id == first.job.id


OTHERS: dict[str, tuple[tuple[dict[str, Any], ...], dict[str, Any]]] = {
    "input": (({"output": {"said": "goodbye"}},), {}),
    "an explicit default": (({"output": {"said": "hello"}, "sleep_ms": 0},), {}),
    "list order": (({"output": {"said": "hello"}}, {"artifacts": 1}), {}),
    "true for 1": (({"output": {"said": True}},), {}),
    "target id": ((), {"target_id": "n2"}),
    "target type": ((), {"target_type": "page"}),
    "priority": ((), {"priority": 50}),
    "output version": ((), {"output_schema_version": "1"}),
}


def test_key_reused_for_another_request_is_refused_with_its_job(kit: Kit) -> None:
    job = kit.new_job(idempotency_key="k")
    for other, (calls, changes) in OTHERS.items():
        code, details = _refusal(kit, kit.request(*calls, idempotency_key="k", **changes))
        assert (code, details) == ("IDEMPOTENCY_KEY_REUSED", {"jobId": job.id, "reason": "other_request"}), other


@pytest.mark.parametrize("state", ["failed", "cancelled", "succeeded", "retrying"])
def test_repeated_key_returns_its_job_in_any_state(kit: Kit, state: str) -> None:
    job_id, _ = kit.job_in(state, idempotency_key="k")
    before = kit.everything()
    again = kit.create(idempotency_key="k")
    assert (again.created, again.job.id) == (False, job_id)
    assert kit.everything() == before


class StricterInput(BaseModel):
    """A later input schema of the synthetic type."""

    model_config = ConfigDict(extra="forbid")

    steps: list[str]


def change_definition(kit: Kit, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    changed = replace(DEFINITION, **changes)
    monkeypatch.setattr(kit.services.registry, "get", lambda job_type: changed)


TOMORROW: dict[str, dict[str, Any]] = {
    "the input's schema": {"input": Input("2", StricterInput)},
    "the output's version": {"output": replace(DEFINITION.output, schema_version="2")},
    "the credential modes": {"credential": Credential(("user_deepseek_key",), "user_deepseek_key")},
}


@pytest.mark.parametrize("what", TOMORROW)
def test_repeated_key_returns_its_job_after_the_definition_changed(
    sqlite_kit: Kit, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    kit = sqlite_kit
    overrides = {"output_schema_version": "1", "credential_mode": "platform_key"}
    job = kit.new_job(idempotency_key="k", **overrides)
    change_definition(kit, monkeypatch, **TOMORROW[what])
    assert kit.create(idempotency_key="k", **overrides).job.id == job.id
    _, details = _refusal(kit, kit.request(idempotency_key="k", target_id="n2", **overrides))
    assert details == {"jobId": job.id, "reason": "other_request"}
    with pytest.raises(InputInvalid):
        kit.create(idempotency_key="another", **overrides)


@pytest.mark.parametrize(
    "changes",
    [
        {"input": {"calls": 5}},
        {"input": {"calls": [{"output": {"a": 2**53}}]}},
        {"input": {"calls": [{"output": {"a": float("nan")}}]}},
        {"input": {"calls": [{"output": {"a": "\ud800"}}]}},
        {"input": {"calls": deep(2000)}},
        {"target_id": " n1"},
        {"target_type": "t" * 65},
        {"priority": 900},
        {"credential_mode": "user_deepseek_key", "credential_id": 5},
        {"credential_mode": "user_deepseek_key", "credential_id": "\x00"},
    ],
)
def test_used_key_with_an_invalid_request_is_reused_and_not_invalid(sqlite_kit: Kit, changes: dict[str, Any]) -> None:
    job = sqlite_kit.new_job(idempotency_key="k")
    code, details = _refusal(sqlite_kit, sqlite_kit.request(idempotency_key="k", **changes))
    assert (code, details) == ("IDEMPOTENCY_KEY_REUSED", {"jobId": job.id, "reason": "other_request"})


def test_expired_key_is_refused_before_the_input_is_checked(sqlite_kit: Kit) -> None:
    gone = new_id()
    of_job = {"user_id": "u1", "job_type": "synthetic", "idempotency_key": "k", "request_hash": "k1:0"}
    with sqlite_kit.database.transaction() as session:
        session.add(JobTombstone(job_id=gone, deleted_at=BEGIN, **of_job))
    refusal = _refusal(sqlite_kit, sqlite_kit.request(idempotency_key="k", input={"calls": 5}))
    assert refusal == ("IDEMPOTENCY_KEY_REUSED", {"jobId": gone, "reason": "expired"})


def test_key_of_a_deleted_job_is_expired(kit: Kit) -> None:
    gone = new_id()
    with kit.database.transaction() as session:
        session.add(
            JobTombstone(
                job_id=gone,
                user_id="u1",
                job_type="synthetic",
                idempotency_key="k",
                request_hash="k1:0",
                deleted_at=BEGIN,
            )
        )
    assert _refusal(kit, kit.request(idempotency_key="k")) == (
        "IDEMPOTENCY_KEY_REUSED",
        {"jobId": gone, "reason": "expired"},
    )
    assert kit.create(idempotency_key="K").created
    assert kit.create(idempotency_key="k", user_id="u2").created
    assert kit.create(idempotency_key="k", job_type="synthetic_background").created


ALIKE = (
    *("Order-A", "order-a", "ORDER-A", "ord\u00e9r-a", "orde\u0301r-a", "\uff2frder-a", "order-\uff41"),
    *("stra\u00dfe", "strasse", "STRASSE", "k", "\uff4b", "K", "\u212a", "k-", "k\u200b", "\u0131", "i", "\u0130"),
    *("\ufb01", "fi"),
)


def test_similar_keys_are_different_jobs_on_every_database(kit: Kit) -> None:
    ids = {key: kit.new_job(idempotency_key=key).id for key in ALIKE}
    assert len(set(ids.values())) == len(ALIKE)
    for key, job_id in ids.items():
        assert kit.create(idempotency_key=key).job.id == job_id
    assert len({event.dedupe_key for job_id in ids.values() for event in kit.events(job_id)}) == len(ALIKE)


def test_users_and_types_with_one_key_have_their_own_jobs_and_messages(kit: Kit) -> None:
    jobs = [
        kit.new_job(user_id=user, idempotency_key="k", job_type=job_type)
        for user in ("u1", "U1", "ú1", "u1:k=k")
        for job_type in ("synthetic", "synthetic_background")
    ]
    assert len({job.id for job in jobs}) == 8
    assert kit.broker.pending_count("ai-interactive") + kit.broker.pending_count("ai-background") == 8


def test_key_equal_to_a_job_id_has_its_own_event(kit: Kit) -> None:
    keyless = kit.new_job()
    keyed = kit.new_job(idempotency_key=keyless.id)
    also = kit.new_job(idempotency_key=f"j={keyless.id}")
    assert len({kit.events(job.id)[0].dedupe_key for job in (keyless, keyed, also)}) == 3


def test_rotated_message_key_still_matches_the_request_and_a_removed_one_does_not(kit: Kit) -> None:
    job = kit.new_job(idempotency_key="k")
    with open_kit(kit.url, clock=kit.clock, message_keys=KeyRing((("k2", NEW), OLD_KEY))) as rotated:
        assert rotated.create(idempotency_key="k").job.id == job.id
        new = rotated.new_job(idempotency_key="new")
        assert rotated.row(new.id)["request_hash"].startswith("k2:")
    with open_kit(kit.url, clock=kit.clock, message_keys=KeyRing((("k2", NEW),))) as later:
        assert later.create(idempotency_key="new").job.id == new.id
        code, details = _refusal(later, later.request(idempotency_key="k"))
        assert (code, details["jobId"]) == ("IDEMPOTENCY_KEY_REUSED", job.id)


def test_request_hash_depends_on_the_message_key(kit: Kit) -> None:
    one = kit.row(kit.new_job(idempotency_key="a").id)["request_hash"]
    same = kit.row(kit.new_job(idempotency_key="b").id)["request_hash"]
    assert one == same, "the idempotency key isn't hashed"
    with open_kit(kit.url, clock=kit.clock, message_keys=KeyRing((("k1", NEW),))) as other:
        assert other.row(other.new_job(idempotency_key="c").id)["request_hash"] != one
    assert kit.row(kit.new_job().id)["request_hash"] is None


def test_job_is_found_by_its_key_after_170_days(kit: Kit) -> None:
    job = kit.new_job(idempotency_key="k")
    kit.advance(timedelta(days=170).total_seconds())
    assert kit.create(idempotency_key="k").job.id == job.id
