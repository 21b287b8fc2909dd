"""Each lifecycle method in each state: it makes its change in full, or changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from aijobs.ids import new_id
from aijobs.jobs.errors import CancelRequested, IllegalTransition, JobGone, JobLockConflict, LifecycleError, LockLost
from aijobs.jobs.lease import JobErrorInfo, Lease
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import END_EVENTS, FINAL, OPEN
from aijobs.outbox.models import OutboxEvent, OutboxEventType, OutboxState
from tests.support.databases import OTHERS_LATER
from tests.support.jobs import BEGIN, Kit

ERROR = JobErrorInfo.of("PROVIDER_UNAVAILABLE", "no route")
Writer = Callable[[Kit, str, Lease], Any]


def _in_session(kit: Kit, work: Callable[[Any], Any]) -> None:
    with kit.database.transaction() as session:
        work(session)


def _expire(kit: Kit, job_id: str, lease: Lease) -> AiJob:
    return kit.lifecycle.expire(lease, kit.job(job_id).lock_until or BEGIN)


WRITERS: dict[str, Writer] = {
    "lock_job": lambda kit, job_id, lease: kit.lifecycle.lock_job(job_id, "worker-2"),
    "extend_lock": lambda kit, job_id, lease: kit.lifecycle.extend_lock(lease),
    "report_progress": lambda kit, job_id, lease: kit.lifecycle.report_progress(lease, 40),
    "save_output": lambda kit, job_id, lease: kit.lifecycle.save_output(lease, {"said": "yes"}),
    "note_provider_call": lambda kit, job_id, lease: _in_session(
        kit, lambda s: kit.lifecycle.note_provider_call(s, lease)
    ),
    "lock_row": lambda kit, job_id, lease: _in_session(kit, lambda s: kit.lifecycle.lock_row(s, lease)),
    "mark_succeeded": lambda kit, job_id, lease: kit.lifecycle.mark_succeeded(lease),
    "mark_failed": lambda kit, job_id, lease: kit.lifecycle.mark_failed(lease, ERROR),
    "mark_cancelled by lease": lambda kit, job_id, lease: kit.lifecycle.mark_cancelled(lease),
    "mark_cancelled by id": lambda kit, job_id, lease: kit.lifecycle.mark_cancelled(job_id),
    "request_cancel": lambda kit, job_id, lease: kit.lifecycle.request_cancel(job_id, "user:u1"),
    "release": lambda kit, job_id, lease: kit.lifecycle.release(lease),
    "release_for_retry": lambda kit, job_id, lease: kit.lifecycle.release_for_retry(lease, BEGIN + timedelta(hours=1)),
    "expire": _expire,
    "give_up": lambda kit, job_id, lease: kit.lifecycle.give_up(job_id, kit.job(job_id).attempt_no + 1, ERROR),
}

STATES = ("queued", "retrying", "running", "cancel_requested", "succeeded", "failed", "cancelled")
HOLDERS = tuple(
    name for name in WRITERS if name not in ("lock_job", "mark_cancelled by id", "request_cancel", "give_up")
)

Outcome = tuple[str, list[str]] | type[LifecycleError]
"""The state afterwards and the history rows that were added; or the error."""

ALLOWED: dict[str, dict[str, Outcome]] = {
    "queued": {
        "lock_job": ("running", ["locked"]),
        "request_cancel": ("cancelled", ["cancel_requested", "cancelled"]),
        "give_up": ("failed", ["locked", "failed"]),
        "mark_cancelled by id": IllegalTransition,
        **dict.fromkeys(HOLDERS, LockLost),
    },
    "retrying": {
        "lock_job": ("running", ["locked"]),
        "request_cancel": ("cancelled", ["cancel_requested", "cancelled"]),
        "give_up": ("failed", ["locked", "failed"]),
        "mark_cancelled by id": IllegalTransition,
        **dict.fromkeys(HOLDERS, LockLost),
    },
    "running": {
        "lock_job": JobLockConflict,
        "extend_lock": ("running", []),
        "report_progress": ("running", []),
        "save_output": ("running", ["output_saved"]),
        "note_provider_call": ("running", ["provider_called"]),
        "lock_row": ("running", []),
        "mark_succeeded": ("succeeded", ["succeeded"]),
        "mark_failed": ("failed", ["failed"]),
        "mark_cancelled by lease": IllegalTransition,
        "mark_cancelled by id": JobLockConflict,
        "request_cancel": ("running", ["cancel_requested"]),
        "release": ("running", ["released"]),
        "release_for_retry": ("running", ["retry_scheduled"]),
        "expire": ("running", ["lease_lost"]),
        "give_up": JobLockConflict,
    },
    "cancel_requested": {
        "lock_job": JobLockConflict,
        "extend_lock": ("running", []),
        "report_progress": ("running", []),
        "save_output": ("running", ["output_saved"]),
        "note_provider_call": CancelRequested,
        "lock_row": CancelRequested,
        "mark_succeeded": CancelRequested,
        "mark_failed": ("cancelled", ["cancelled"]),
        "mark_cancelled by lease": ("cancelled", ["cancelled"]),
        "mark_cancelled by id": JobLockConflict,
        "request_cancel": ("running", []),
        "release": ("cancelled", ["cancelled"]),
        "release_for_retry": ("cancelled", ["cancelled"]),
        "expire": ("cancelled", ["cancelled"]),
        "give_up": JobLockConflict,
    },
    **{
        final: {
            "lock_job": JobLockConflict,
            "give_up": JobLockConflict,
            "mark_cancelled by id": IllegalTransition,
            "request_cancel": (final, []),
            **dict.fromkeys(HOLDERS, IllegalTransition),
        }
        for final in sorted(FINAL)
    },
}


def test_table_names_each_writer_in_each_state() -> None:
    assert {state: set(cells) for state, cells in ALLOWED.items()} == {state: set(WRITERS) for state in STATES}


@OTHERS_LATER
@pytest.mark.parametrize("writer", WRITERS)
def test_writer_changes_a_job_only_in_its_allowed_states(kit: Kit, writer: str) -> None:
    for state in STATES:
        _check_cell(kit, state, writer)


def _check_cell(kit: Kit, state: str, writer: str) -> None:
    job_id, lease = kit.job_in(state, user_id=f"user of {state}")
    before, history = kit.everything(), kit.types(job_id)
    outcome = ALLOWED[state][writer]
    kit.advance(1)
    if isinstance(outcome, type):
        with pytest.raises(outcome) as refused:
            WRITERS[writer](kit, job_id, lease)
        assert type(refused.value) is outcome, f"{writer} on {state}"
        assert kit.everything() == before, f"{writer} on {state} wrote something"
        return
    after, added = outcome
    WRITERS[writer](kit, job_id, lease)
    job = kit.job(job_id)
    assert job.lifecycle_status == after, f"{writer} on {state}"
    assert kit.types(job_id) == history + added, f"{writer} on {state}"
    if state in FINAL:
        assert kit.everything() == before, f"{writer} on {state} wrote something"
    # The dispatcher, which gives a job up, marks its enqueue event dead itself.
    _check_row(kit, job, event_left=writer == "give_up")
    others = {row["id"]: row for row in before["ai_jobs"] if row["id"] != job_id}
    assert {row["id"]: row for row in kit.rows("ai_jobs") if row["id"] != job_id} == others


def _check_row(kit: Kit, job: AiJob, *, event_left: bool) -> None:
    """Check what holds for a job in any state."""
    ends = [event for event in kit.events(job.id) if event.event_type != OutboxEventType.ENQUEUE]
    if job.lifecycle_status in FINAL:
        assert [event.event_type for event in ends] == [END_EVENTS[job.lifecycle_status]]
        assert (job.locked_by, job.locked_at, job.lock_until, job.next_attempt_at) == (None, None, None, None)
        assert job.finished_at is not None
    else:
        assert ends == []
        assert job.finished_at is None
    assert (job.locked_by is None) == (job.lock_until is None) == (job.locked_at is None)
    waits = job.lifecycle_status in OPEN and job.locked_by is None
    enqueues = kit.events(job.id, OutboxEventType.ENQUEUE)
    cancelled_waiting = job.lifecycle_status == "cancelled" and kit.history(job.id)[-1].instance is None
    last = job.attempt_no + (1 if waits or cancelled_waiting else 0)
    assert [_attempt(event) for event in enqueues] == list(range(1, last + 1)), "one event an attempt"
    if not event_left:
        assert [_attempt(event) for event in enqueues if event.status == OutboxState.PENDING] == (
            [last] if waits else []
        )


def _attempt(event: OutboxEvent) -> int:
    return int(event.dedupe_key.rpartition(":")[2])


@pytest.mark.parametrize("writer", [name for name in WRITERS if name not in ("expire", "give_up")])
def test_writer_refuses_a_job_that_does_not_exist(sqlite_kit: Kit, writer: str) -> None:
    kit, nobody = sqlite_kit, new_id()
    with pytest.raises(JobLockConflict if writer == "lock_job" else JobGone):
        WRITERS[writer](kit, nobody, Lease(nobody, "worker-1/x", 1))
    assert kit.counts() == {}


def test_legacy_status_follows_each_state_and_a_cancel_request(kit: Kit) -> None:
    for state in (*STATES, "cancelled_waiting"):
        kit.job_in(state)
    pairs = {(row["lifecycle_status"], row["status"]) for row in kit.rows("ai_jobs")}
    assert pairs == {
        ("queued", "pending"),
        ("running", "processing"),
        ("running", "cancel_requested"),
        ("succeeded", "completed"),
        ("failed", "failed"),
        ("cancelled", "cancelled"),
    }


def test_legacy_status_cannot_be_written(kit: Kit) -> None:
    job_id = kit.new_job().id
    with pytest.raises(DBAPIError), kit.database.transaction() as session:
        session.execute(text("UPDATE ai_jobs SET status = 'completed'"))
    assert kit.row(job_id)["status"] == "pending"


def test_database_refuses_a_sixth_state(kit: Kit) -> None:
    job_id = kit.new_job().id
    with pytest.raises(DBAPIError):
        kit.set(job_id, lifecycle_status="retrying")
    assert kit.job(job_id).lifecycle_status == "queued"
