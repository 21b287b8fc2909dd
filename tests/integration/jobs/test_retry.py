"""A retry is a new job. The old job keeps its history, and a chain has one newest job."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel, Field

from aijobs.canonical import canonical_hash
from aijobs.definitions.definition import Input, JobDefinition, Queue
from aijobs.errors import ApiError
from aijobs.ids import new_id
from aijobs.job_types.synthetic import DEFINITION
from aijobs.jobs.chains import newest_of_chain
from aijobs.jobs.lease import JobErrorInfo
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreatedJob
from aijobs.jobs.snapshots import delete_expired
from aijobs.jobs.status import FINAL
from aijobs.monitor.chains import find_chains
from tests.support.jobs import BEGIN, Kit, race
from tests.support.rows import build_job

LOST = JobErrorInfo.of("INTERNAL_WORKER_LOST", "gone")


def _refusal(kit: Kit, job_id: str) -> tuple[str, dict[str, Any] | None]:
    before = kit.everything()
    with pytest.raises(ApiError) as refused:
        kit.jobs.retry(job_id, "operator:ann")
    assert kit.everything() == before, "a refused retry writes nothing"
    return refused.value.code, refused.value.details


def _retry(kit: Kit, job_id: str) -> AiJob:
    retried = kit.jobs.retry(job_id, "operator:ann")
    assert retried.created
    return retried.job


@pytest.mark.parametrize(
    ("end", "losses"), [("LOST", 1), ("CANCELLED", 1), ("TIMEOUT", 0)], ids=["its workers", "a cancel", "its own error"]
)
def test_retry_is_a_suspect_unless_the_job_ended_with_its_own_error(kit: Kit, end: str, losses: int) -> None:
    lease = kit.running()
    kit.set(lease.job_id, uncharged_losses=1)
    if end == "CANCELLED":
        kit.lifecycle.request_cancel(lease.job_id, "user:u1")
        kit.lifecycle.mark_cancelled(lease)
    else:
        kit.lifecycle.mark_failed(lease, LOST if end == "LOST" else JobErrorInfo.of(end, "late"))
    assert _retry(kit, lease.job_id).losses == losses


def test_child_inherits_the_request_and_nothing_of_the_attempts(kit: Kit) -> None:
    parent = kit.new_job({"output": {"a": 1}}, idempotency_key="k", priority=7, target_id="n9", user_id="u9")
    lease = kit.lock(parent.id)
    kit.lifecycle.report_progress(lease, 60)
    kit.lifecycle.release_for_retry(lease, BEGIN, error_code="PROVIDER_UNAVAILABLE", faults=["too short"])
    lease = kit.lock(parent.id)
    kit.advance(100)
    kit.lifecycle.mark_failed(lease, LOST)
    kit.set(parent.id, retry_count=2, lost_count=2)
    before, history = kit.row(parent.id), kit.rows("ai_job_events", job_id=parent.id)
    kit.advance(50)
    child = _retry(kit, parent.id)
    assert kit.row(parent.id) == before
    assert kit.rows("ai_job_events", job_id=parent.id) == history
    fresh = kit.row(kit.new_job(user_id="u9").id)
    row = kit.row(child.id)
    inherited = {name: value for name, value in row.items() if value != fresh[name]}
    assert inherited == {
        "id": child.id,
        "priority": 7,
        "target_id": "n9",
        "trigger_type": "admin",
        "parent_job_id": parent.id,
        "root_id": parent.id,
        "uncharged_losses": 1,
    }
    assert row["created_at"] == BEGIN + timedelta(seconds=150)
    assert [(one.type, one.actor) for one in kit.history(child.id)] == [("created", "admin")]
    copied, original = (kit.rows("ai_job_snapshots", job_id=job_id)[0] for job_id in (child.id, parent.id))
    assert (copied["content"], copied["content_hash"]) == (original["content"], original["content_hash"])
    assert copied["expires_at"] == BEGIN + timedelta(seconds=150, days=30)


def test_child_has_its_own_enqueue_event_and_message(kit: Kit) -> None:
    parent, _ = kit.job_in("failed", idempotency_key="k")
    kit.broker.lose_all()
    child = _retry(kit, parent)
    (event,) = kit.events(child.id)
    assert event.dedupe_key == f"synthetic:u1:j={child.id}:1"
    assert event.dedupe_key != kit.events(parent)[0].dedupe_key
    assert kit.broker.take("ai-interactive").job_id == child.id
    lease = kit.lock(child.id)
    assert kit.lifecycle.mark_succeeded(lease).lifecycle_status == "succeeded"


def test_child_runs_by_todays_definition(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    parent, _ = kit.job_in("failed")
    kit.services.registry._definitions["synthetic"] = replace(
        DEFINITION,
        queue=Queue("ai-background", 1),
        execution=replace(DEFINITION.execution, max_retries=9),
        output=replace(DEFINITION.output, schema_version="2"),
    )
    child = _retry(kit, parent)
    assert (child.queue_name, child.max_retry_count, child.output_schema_version, child.priority) == (
        "ai-background",
        9,
        "2",
        50,
    )
    assert kit.broker.pending_count("ai-background") == 1


@pytest.mark.parametrize("state", ["failed", "cancelled", "cancelled_waiting"])
def test_failed_and_cancelled_jobs_can_be_retried(kit: Kit, state: str) -> None:
    parent, _ = kit.job_in(state)
    child = _retry(kit, parent)
    assert (child.parent_job_id, child.cancel_requested_at, child.lifecycle_status) == (parent, None, "queued")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("queued", "not_final"),
        ("running", "not_final"),
        ("retrying", "not_final"),
        ("cancel_requested", "not_final"),
        ("succeeded", "succeeded"),
    ],
)
def test_no_other_state_can_be_retried(kit: Kit, state: str, reason: str) -> None:
    parent, _ = kit.job_in(state)
    assert _refusal(kit, parent) == ("JOB_NOT_RETRYABLE", {"reason": reason})


def test_retry_of_no_job_is_not_found(kit: Kit) -> None:
    for nobody in (new_id(), "", "x' OR 1=1"):
        assert _refusal(kit, nobody) == ("JOB_NOT_FOUND", None)


def test_second_retry_returns_the_live_child(kit: Kit) -> None:
    parent, _ = kit.job_in("failed")
    child = _retry(kit, parent)
    before = kit.everything()
    for state in ("queued", "running"):
        again = kit.jobs.retry(parent, "operator:bob")
        assert (again.created, again.job.id, again.job.lifecycle_status) == (False, child.id, state)
        if state == "queued":
            assert kit.everything() == before
            lease = kit.lock(child.id)
    kit.lifecycle.mark_failed(lease, LOST)
    assert _refusal(kit, parent) == ("JOB_NOT_RETRYABLE", {"reason": "superseded", "newestJobId": child.id})


def test_only_the_newest_of_a_chain_can_be_retried(kit: Kit) -> None:
    root, _ = kit.job_in("failed")
    chain = [root]
    for _ in range(4):
        kit.advance(1)
        child = _retry(kit, chain[-1])
        kit.lifecycle.mark_failed(kit.lock(child.id), LOST)
        chain.append(child.id)
    rows = {job_id: kit.row(job_id) for job_id in chain}
    assert [rows[job_id]["root_id"] for job_id in chain] == [root] * 5
    assert [rows[job_id]["parent_job_id"] for job_id in chain] == [None, *chain[:-1]]
    for old in chain[:-1]:
        assert _refusal(kit, old) == ("JOB_NOT_RETRYABLE", {"reason": "superseded", "newestJobId": chain[-1]})
    newest = _retry(kit, chain[-1])
    for old in chain[:-1]:
        assert _refusal(kit, old)[1] == {"reason": "superseded", "newestJobId": newest.id}
    assert {job_id: kit.row(job_id) for job_id in chain} == rows


def test_twenty_retries_at_once_create_one_child(live_kit: Kit) -> None:
    kit = live_kit
    parent, _ = kit.job_in("failed")
    kit.broker.lose_all()
    outcomes = race(*[partial(kit.jobs.retry, parent, "operator:ann")] * 20)
    assert all(isinstance(one, CreatedJob) for one in outcomes), outcomes
    assert len({one.job.id for one in outcomes}) == 1
    assert [one.created for one in outcomes].count(True) == 1
    assert len(kit.rows("ai_jobs", parent_job_id=parent)) == 1
    assert kit.broker.pending_count("ai-interactive") == 1


def test_database_refuses_a_second_child(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, _ = kit.job_in("failed")
    child = _retry(kit, parent)
    reads = []
    real = kit.jobs._retries._live_child

    def blind_once(*arguments: Any) -> AiJob | None:
        reads.append(1)
        return None if len(reads) == 1 else real(*arguments)

    monkeypatch.setattr(kit.jobs._retries, "_live_child", blind_once)
    before = kit.everything()
    again = kit.jobs.retry(parent, "operator:ann")
    assert (again.created, again.job.id) == (False, child.id)
    assert kit.everything() == before


# --- what is refused ----------------------------------------------------------------------------------------------


def test_job_of_an_unregistered_type_is_not_retried(sqlite_kit: Kit) -> None:
    sqlite_kit.new_job()  # It creates the user's row.
    job = build_job(job_type="gone", lifecycle_status="failed")
    with sqlite_kit.database.transaction() as session:
        session.add(job)
    assert _refusal(sqlite_kit, job.id) == ("JOB_NOT_RETRYABLE", {"reason": "unknown_job_type"})


def test_job_without_its_credential_is_not_retried(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    parent, _ = kit.job_in("failed")
    kit.set(parent, credential_mode="user_deepseek_key")
    assert _refusal(kit, parent) == ("JOB_NOT_RETRYABLE", {"reason": "credential_gone"})


def test_snapshots_of_final_jobs_expire_and_those_jobs_are_not_retried(kit: Kit) -> None:
    states = ("queued", "running", "retrying", "cancel_requested", "failed", "cancelled", "succeeded")
    jobs = {state: kit.job_in(state)[0] for state in states}
    child = _retry(kit, kit.job_in("failed")[0])
    kit.advance(timedelta(days=30, seconds=-1).total_seconds())
    assert kit.database.write(lambda s: delete_expired(s, kit.clock, 100)) == 0
    kit.advance(1)
    assert kit.database.write(lambda s: delete_expired(s, kit.clock, 2)) == 2
    assert kit.database.write(lambda s: delete_expired(s, kit.clock, 100)) == 2
    left = {row["job_id"] for row in kit.rows("ai_job_snapshots")}
    assert left == {child.id} | {job_id for state, job_id in jobs.items() if state not in FINAL}
    for state in ("failed", "cancelled"):
        assert _refusal(kit, jobs[state]) == ("JOB_NOT_RETRYABLE", {"reason": "snapshot_expired"})
    assert kit.types(jobs["succeeded"]) == ["created", "locked", "succeeded"]


def test_expired_snapshot_is_rebuilt_if_the_type_can(sqlite_kit: Kit) -> None:
    kit = sqlite_kit
    parent, _ = kit.job_in("failed", target_id="n5")
    kit.advance(timedelta(days=31).total_seconds())
    kit.database.write(lambda s: delete_expired(s, kit.clock, 100))

    def rebuild(target_type: str, target_id: str) -> dict[str, Any] | None:
        return {"calls": [{"output": {"again": f"{target_type}/{target_id}"}}]}

    registered = kit.services.registry._definitions
    registered["synthetic"] = replace(DEFINITION, rebuild=lambda *_: None)
    assert _refusal(kit, parent) == ("JOB_NOT_RETRYABLE", {"reason": "snapshot_expired"})
    registered["synthetic"] = replace(DEFINITION, rebuild=rebuild)
    child = _retry(kit, parent)
    (snapshot,) = kit.rows("ai_job_snapshots", job_id=child.id)
    assert snapshot["content"]["calls"][0]["output"] == {"again": "note/n5"}


def test_newest_of_a_chain_is_found_by_its_parents_and_not_by_clocks(kit: Kit) -> None:
    """A host whose clock is behind creates a child that is older than its parent."""
    chain = [kit.job_in("failed")[0]]
    for minutes in (-5, -2, -9):
        retried = _retry(kit, chain[-1])
        kit.set(retried.id, created_at=BEGIN + timedelta(minutes=minutes))
        if len(chain) < 3:
            kit.lifecycle.mark_failed(kit.lock(retried.id), LOST)
        chain.append(retried.id)
    assert kit.jobs.retry(chain[2], "operator:ann").job.id == chain[3], "the live child is the newest"
    for old in chain[:2]:
        assert _refusal(kit, old) == ("JOB_NOT_RETRYABLE", {"reason": "superseded", "newestJobId": chain[3]})
    with kit.database.read() as session:
        newest = newest_of_chain(session, chain[0])
        assert newest is not None
        assert newest.id == chain[3]
        assert newest_of_chain(session, "nobody") is None
        assert find_chains(session, [chain[0]])[chain[0]].newest.id == chain[3]


class NewInput(BaseModel):
    """Today's schema: it has `steps`, allows one call, and drops unknown fields."""

    steps: list[str] = Field(default_factory=list)
    calls: list[dict[str, Any]] = Field(max_length=1)


def test_old_input_is_validated_and_labelled_by_todays_schema(kit: Kit) -> None:
    parent, _ = kit.job_in("failed")
    _registered(kit)["synthetic"] = replace(DEFINITION, input=Input("2", NewInput))
    child = _retry(kit, parent)
    (snapshot,) = kit.rows("ai_job_snapshots", job_id=child.id)
    assert (child.input_schema_version, snapshot["schema_version"]) == ("2", "2")
    assert snapshot["content"]["steps"] == [], "today's schema has added it"
    assert snapshot["content_hash"] == canonical_hash(snapshot["content"])


def test_input_that_todays_schema_refuses_is_not_retried(kit: Kit) -> None:
    parent = kit.new_job({}, {}).id
    kit.lifecycle.mark_failed(kit.lock(parent), JobErrorInfo.of("INTERNAL_ERROR"))
    _registered(kit)["synthetic"] = replace(DEFINITION, input=Input("2", NewInput))
    before = kit.everything()
    assert _refusal(kit, parent) == (
        "JOB_NOT_RETRYABLE",
        {"reason": "input_outdated", "inputSchemaVersion": "2"},
    )
    assert kit.everything() == before


@pytest.mark.parametrize("rebuilt", [{"calls": "none"}, {"calls": [{"output": {"a": "\x00"}}]}])
def test_invalid_rebuilt_input_is_outdated_and_names_no_fields(sqlite_kit: Kit, rebuilt: dict[str, Any]) -> None:
    kit = sqlite_kit
    parent, _ = kit.job_in("failed")
    kit.advance(timedelta(days=31).total_seconds())
    kit.database.write(lambda s: delete_expired(s, kit.clock, 100))
    _registered(kit)["synthetic"] = replace(DEFINITION, rebuild=lambda *_: rebuilt)
    assert _refusal(kit, parent) == (
        "JOB_NOT_RETRYABLE",
        {"reason": "input_outdated", "inputSchemaVersion": "1"},
    )


def _registered(kit: Kit) -> dict[str, JobDefinition]:
    """Return the kit's own definitions, which may be changed."""
    return kit.services.registry._definitions


# --- saved outputs ------------------------------------------------------------------------------------------------


def _failed_with_output(kit: Kit, output: Any) -> str:
    lease = kit.running()
    kit.lifecycle.save_output(lease, output)
    kit.lifecycle.mark_failed(lease, JobErrorInfo.of("INTERNAL_PROJECTION"))
    return lease.job_id


@pytest.mark.parametrize("output", [{"output": {"a": "é"}, "artifacts": 1}, {}])
def test_saved_output_is_inherited_with_its_hash(kit: Kit, output: Any) -> None:
    parent = _failed_with_output(kit, output)
    child = kit.row(_retry(kit, parent).id)
    before = kit.row(parent)
    assert child["validated_output"] == before["validated_output"] == output
    assert child["output_hash"] == before["output_hash"]
    assert child["artifact_count"] == 0


@pytest.mark.parametrize("version", ["prompt_version", "input_schema_version", "output_schema_version"])
def test_output_of_other_versions_is_not_inherited(sqlite_kit: Kit, version: str) -> None:
    kit = sqlite_kit
    parent = _failed_with_output(kit, {"paid": True})
    kit.set(parent, **{version: "older"})
    child = kit.row(_retry(kit, parent).id)
    assert (child["validated_output"], child["output_hash"]) == (None, None)
