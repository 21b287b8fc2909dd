"""`aijobs check` finds each kind of broken promise, and nothing in a sound database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, insert, text, update

from aijobs.ai.models import AiUsageLog
from aijobs.db.clock import ManualClock
from aijobs.jobs.models import AiJob, AiJobArtifact, AiJobEvent, JobTombstone
from aijobs.monitor.check import LOST_MESSAGE, MAX_REPEATS, Check, Report
from aijobs.monitor.check_rules import PROMISES, RULES, UNSENT, Bounds
from aijobs.outbox.keys import enqueue_key
from aijobs.outbox.models import OutboxEvent, QueuePause
from aijobs.queues.message import OutgoingMessage
from aijobs.settings import Settings
from aijobs.upkeep.dispatcher import OutboxDispatcher
from aijobs.upkeep.reaper import LockReaper
from tests.support.databases import SqliteDatabases
from tests.support.jobs import BEGIN, Kit, open_kit
from tests.support.scratch import scratch_database

AT_ONCE = Bounds(redrive=timedelta())
"""Missing messages and unsent events are checked again without waiting."""


def check(kit: Kit, *, ask_broker: bool = True) -> Report:
    return Check(kit.database, kit.clock, kit.broker if ask_broker else None, AT_ONCE).run()


def found(kit: Kit, *, ask_broker: bool = False) -> dict[str, tuple[str, ...]]:
    return {finding.what: finding.job_ids for finding in check(kit, ask_broker=ask_broker).findings}


def between_looks(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> list[float]:
    """Run `do` instead of each wait between two checks; return the lengths of the waits."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        do()

    monkeypatch.setattr("aijobs.monitor.check.time.sleep", wait)
    return waits


def dispatcher(kit: Kit) -> OutboxDispatcher:
    return OutboxDispatcher(kit.database, kit.services.outbox_events, kit.lifecycle, kit.broker, "test/dispatcher")


def run(kit: Kit, *statements: object) -> None:
    with kit.database.transaction() as session:
        for statement in statements:
            session.execute(statement)  # type: ignore[call-overload]


def history_row(job_id: str, seq: int, event_type: str, attempt_no: int = 1) -> object:
    return insert(AiJobEvent).values(
        job_id=job_id, seq=seq, type=event_type, attempt_no=attempt_no, actor="test", at=BEGIN
    )


def usage_row(job_id: str, call_no: int, state: str = "done") -> object:
    return insert(AiUsageLog).values(
        job_id=job_id,
        attempt_no=1,
        call_no=call_no,
        user_id="u",
        state=state,
        provider="p",
        model="m",
        credential_mode="platform_key",
        estimated=False,
        billed="unknown",
        started_at=BEGIN,
    )


def test_check_finds_nothing_in_jobs_of_every_state(kit: Kit) -> None:
    for state in ("queued", "running", "retrying", "cancel_requested", "succeeded", "failed", "cancelled"):
        kit.job_in(state)
    kit.job_in("cancelled_waiting")
    failed, _ = kit.job_in("failed")
    kit.jobs.retry(failed, "operator:o")
    report = Check(kit.database, kit.clock, None).run()
    assert report.findings == ()
    assert report.is_sound
    assert report.jobs == 10


def _no_event(kit: Kit) -> str:
    job_id, _ = kit.job_in("succeeded")
    run(kit, delete(OutboxEvent).where(OutboxEvent.event_type == "ai.job.enqueue"))
    return job_id


def _no_job(kit: Kit) -> str:
    job_id, _ = kit.job_in("queued")
    run(kit, delete(AiJobEvent), text("DELETE FROM ai_job_snapshots"), delete(AiJob))
    return job_id


def _changed_after_end(kit: Kit) -> str:
    job_id, _ = kit.job_in("succeeded")
    run(
        kit,
        history_row(job_id, kit.job(job_id).event_seq + 1, "failed"),
        update(AiJob).values(event_seq=AiJob.event_seq + 1, lifecycle_status="failed"),
    )
    return job_id


def _neither_ended_nor_going(kit: Kit) -> str:
    job_id, _ = kit.job_in("failed")
    kit.set(job_id, finished_at=None)
    return job_id


def _no_end_event(kit: Kit) -> str:
    job_id, _ = kit.job_in("cancelled")
    run(kit, delete(OutboxEvent).where(OutboxEvent.event_type == "ai.job.cancelled"))
    return job_id


def _two_attempts_mixed(kit: Kit) -> str:
    job_id, _ = kit.job_in("running")
    seq = kit.job(job_id).event_seq
    run(
        kit,
        history_row(job_id, seq + 1, "locked", 2),
        history_row(job_id, seq + 2, "output_saved", 1),
        update(AiJob).values(event_seq=seq + 2),
    )
    return job_id


def _zombie_wrote(kit: Kit) -> str:
    job_id, _ = kit.job_in("succeeded")
    run(kit, update(AiJobEvent).where(AiJobEvent.type == "succeeded").values(instance="a-zombie"))
    return job_id


def _artifact_too_many(kit: Kit) -> str:
    job_id, _ = kit.job_in("failed")
    run(kit, insert(AiJobArtifact).values(job_id=job_id, artifact_type="t", artifact_id="a", ordinal=0))
    return job_id


def _never_sent(kit: Kit) -> str:
    job_id, _ = kit.job_in("queued")
    kit.advance(600)
    return job_id


def _claim_left_lying(kit: Kit) -> str:
    job_id, _ = kit.job_in("queued")
    claimed = {"status": "processing", "locked_by": "dead", "locked_at": BEGIN, "attempt_count": 1}
    run(kit, update(OutboxEvent).where(OutboxEvent.aggregate_id == job_id).values(**claimed))
    kit.advance(600)
    return job_id


def _lease_left_lying(kit: Kit) -> str:
    job_id, _ = kit.job_in("running")
    kit.advance(600)
    return job_id


def _nobody_asks(kit: Kit) -> str:
    job_id, _ = kit.job_in("retrying")
    run(kit, update(OutboxEvent).values(status="dead"))
    return job_id


def _cancel_overruled(kit: Kit) -> str:
    job_id, _ = kit.job_in("succeeded")
    kit.set(job_id, cancel_requested_at=BEGIN)
    return job_id


def _cancelled_unasked(kit: Kit) -> str:
    job_id, _ = kit.job_in("cancelled")
    kit.set(job_id, cancel_requested_at=None)
    return job_id


def _bought_again(kit: Kit) -> str:
    job_id, _ = kit.job_in("running")
    seq = kit.job(job_id).event_seq
    calls = [history_row(job_id, seq + n, kind) for n, kind in enumerate(("output_saved", "provider_called"), 1)]
    run(kit, *calls, usage_row(job_id, 1), update(AiJob).values(event_seq=seq + 2))
    return job_id


def _bought_again_by_a_retry(kit: Kit) -> str:
    parent, _ = kit.job_in("failed")
    kit.set(parent, output_hash="0" * 64)
    child = kit.jobs.retry(parent, "operator:o").job.id
    lease = kit.lock(child)
    with kit.database.transaction() as session:
        kit.lifecycle.note_provider_call(session, lease)
    run(kit, usage_row(child, 1))
    return child


def _call_without_row(kit: Kit) -> str:
    job_id, lease = kit.job_in("running")
    assert lease is not None
    with kit.database.transaction() as session:
        kit.lifecycle.note_provider_call(session, lease)
    return job_id


def _row_without_call(kit: Kit) -> str:
    job_id, _ = kit.job_in("failed")
    run(kit, usage_row(job_id, 1))
    return job_id


def _call_left_open(kit: Kit) -> str:
    job_id = _call_without_row(kit)
    run(kit, usage_row(job_id, 1, state="started"))
    kit.advance(1800)
    return job_id


def _deleted_key_repeated(kit: Kit) -> str:
    job = kit.new_job(idempotency_key="k")
    run(
        kit,
        insert(JobTombstone).values(
            job_id="another",
            user_id=job.user_id,
            job_type=job.job_type,
            idempotency_key="k",
            request_hash="h",
            deleted_at=BEGIN,
        ),
    )
    return job.id


def _gap_in_history(kit: Kit) -> str:
    job_id, _ = kit.job_in("succeeded")
    run(kit, delete(AiJobEvent).where(AiJobEvent.type == "locked"))
    return job_id


def _begins_otherwise(kit: Kit) -> str:
    job_id, _ = kit.job_in("running")
    run(kit, update(AiJobEvent).where(AiJobEvent.seq == 1).values(type="released"))
    return job_id


def _history_disagrees(kit: Kit) -> str:
    job_id, _ = kit.job_in("succeeded")
    kit.set(job_id, lifecycle_status="failed")
    return job_id


BREAKS = {
    "has no enqueue event": _no_event,
    "has an enqueue event but no row": _no_job,
    "changed after its end": _changed_after_end,
    "is neither ended nor going on": _neither_ended_nor_going,
    "ended without its end event": _no_end_event,
    "has history of two attempts mixed": _two_attempts_mixed,
    "was written to by another than the holder of the attempt": _zombie_wrote,
    "has another number of artifacts than its projection made": _artifact_too_many,
    "has an event that should have been sent long ago": _never_sent,
    "has an event that a dispatcher took long ago and left lying": _claim_left_lying,
    "has a lease that ran out long ago": _lease_left_lying,
    "waits, and nothing asks for its next attempt": _nobody_asks,
    "was asked to cancel and did not end so": _cancel_overruled,
    "is cancelled and nobody asked": _cancelled_unasked,
    "asked the provider again with a saved answer": _bought_again,
    "is a retry that bought what its parent had saved": _bought_again_by_a_retry,
    "made a provider call that has no usage row": _call_without_row,
    "has a usage row that no call stands for": _row_without_call,
    "has a usage row that was never closed": _call_left_open,
    "repeats a deleted job's key": _deleted_key_repeated,
    "has gaps in its history": _gap_in_history,
    "has a history that begins otherwise than with its creation": _begins_otherwise,
    "stands otherwise than its history says": _history_disagrees,
}


@pytest.mark.parametrize("what", BREAKS)
def test_broken_promise_is_found_and_its_job_named(kit: Kit, what: str) -> None:
    job_id = BREAKS[what](kit)
    assert job_id in found(kit).get(what, ())


def test_each_rule_has_a_test_and_each_promise_a_rule() -> None:
    assert [rule.what for rule in RULES] == list(BREAKS)
    assert {rule.promise for rule in RULES} == set(PROMISES)


@pytest.mark.parametrize(
    "broken", [delete(OutboxEvent), update(OutboxEvent).values(status="dead")], ids=["gone", "dead"]
)
def test_missing_enqueue_event_of_a_later_attempt_is_found(kit: Kit, broken: Any) -> None:
    stranded, _ = kit.job_in("retrying")
    well, _ = kit.job_in("retrying")
    for job_id in (stranded, well):  # A third attempt is due, and the events of the first two were published.
        kit.lifecycle.release(kit.lock(job_id))
    assert found(kit) == {}
    run(kit, broken.where(OutboxEvent.dedupe_key == enqueue_key(kit.job(stranded), 3)))
    assert [event.status for event in kit.events(stranded)][:2] == ["published", "published"]
    dispatcher(kit).cycle()
    kit.advance(86_400)
    assert found(kit, ask_broker=True) == {"waits, and nothing asks for its next attempt": (stranded,)}


def test_dead_enqueue_event_of_the_first_attempt_is_found(kit: Kit) -> None:
    job_id, _ = kit.job_in("queued")
    run(kit, update(OutboxEvent).values(status="dead"))
    assert found(kit) == {"waits, and nothing asks for its next attempt": (job_id,)}


def test_lost_message_is_a_finding_only_if_the_redrive_is_late(kit: Kit) -> None:
    job_id, _ = kit.job_in("queued")
    run(kit, update(OutboxEvent).values(status="published", published_at=BEGIN))
    kit.advance(170)
    assert found(kit, ask_broker=True) == {}, "the re-drive may still send it"
    kit.advance(60)
    assert LOST_MESSAGE not in found(kit, ask_broker=True), "the message is in the queue: a healthy backlog"
    kit.broker.lose_all()
    assert found(kit, ask_broker=True)[LOST_MESSAGE] == (job_id,)
    kit.pause(kit.job(job_id).queue_name)
    assert found(kit, ask_broker=True) == {}, "a paused queue is no finding"


def test_message_popped_during_the_check_is_no_finding(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, _ = kit.job_in("queued")
    run(kit, update(OutboxEvent).values(status="published", published_at=BEGIN))
    kit.advance(600)
    kit.broker.lose_all()
    look = kit.broker.find_missing

    def lock_it_meanwhile(messages: Sequence[OutgoingMessage]) -> set[str]:
        missing = look(messages)
        if kit.job(job_id).lifecycle_status == "queued":
            kit.lock(job_id)
        return missing

    monkeypatch.setattr(kit.broker, "find_missing", lock_it_meanwhile)
    assert LOST_MESSAGE not in found(kit, ask_broker=True)


def test_lost_message_is_found_in_a_long_backlog(sqlite_kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [sqlite_kit.new_job().id for _ in range(12)]
    run(sqlite_kit, update(OutboxEvent).where(OutboxEvent.aggregate_id == ids[-1]).values(status="published"))
    monkeypatch.setattr("aijobs.monitor.check.PAGE", 2)
    sqlite_kit.advance(600)
    sqlite_kit.broker.lose_all()
    assert found(sqlite_kit, ask_broker=True)[LOST_MESSAGE] == (ids[-1],)


def test_broker_outage_is_reported_and_hides_no_other_finding(kit: Kit) -> None:
    job_id = _cancelled_unasked(kit)
    kit.job_in("queued")
    run(kit, update(OutboxEvent).values(status="published", published_at=BEGIN))
    left = _claim_left_lying(kit)
    kit.broker.away = True
    report = check(kit)
    assert report.broker == "away"
    assert [finding.job_ids for finding in report.findings] == [(left,), (job_id,)]
    assert report.left_out == (UNSENT.what, LOST_MESSAGE)
    assert report.rules == len(RULES) - 1


def test_unsent_events_during_a_broker_outage_are_left_out(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = between_looks(monkeypatch, lambda: None)
    kit.broker.away = True
    kit.new_job()
    kit.advance(200)
    dispatcher(kit).cycle()
    report = check(kit)
    assert (report.findings, report.broker) == ((), "away")
    assert report.left_out == (UNSENT.what, LOST_MESSAGE)
    assert waits == [], "the check doesn't wait for findings that it leaves out"


def test_unsent_events_right_after_a_broker_outage_are_no_finding(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.new_job()
    kit.advance(200)
    waits = between_looks(monkeypatch, dispatcher(kit).cycle)
    report = check(kit)
    assert (report.findings, report.broker, report.left_out) == ((), "asked", ())
    assert len(waits) == 1


def test_unsent_events_are_no_finding_if_the_broker_fails_during_the_check(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.new_job()
    kit.advance(200)
    between_looks(monkeypatch, lambda: setattr(kit.broker, "away", True))
    report = check(kit)
    assert (report.findings, report.broker) == ((), "away")


def test_event_that_is_never_sent_is_found_while_the_broker_works(kit: Kit) -> None:
    job_id = _never_sent(kit)
    report = check(kit)
    assert [(finding.what, finding.job_ids) for finding in report.findings] == [(UNSENT.what, (job_id,))]
    assert (report.broker, report.left_out, report.rules) == ("asked", (), len(RULES) + 1)


def test_shrinking_backlog_of_a_resumed_queue_is_no_finding(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [kit.new_job().id for _ in range(4)]
    kit.pause()
    kit.advance(3600)
    assert found(kit, ask_broker=True) == {}
    run(kit, delete(QueuePause))
    stuck = ids[0]

    def work_off_one() -> None:
        held = {event.id: event for job_id in ids[1:] for event in kit.events(job_id) if event.status == "pending"}
        run(kit, update(OutboxEvent).where(OutboxEvent.id.in_(sorted(held)[:1])).values(status="published"))
        run(kit, update(OutboxEvent).values(last_sent_at=kit.clock.now()))

    waits = between_looks(monkeypatch, work_off_one)
    assert found(kit, ask_broker=True)[UNSENT.what] == (stuck,)
    assert len(waits) == 4, "three dispatched events, and one more check with the same result"


def test_number_of_repeated_checks_of_a_shrinking_backlog_is_limited(
    sqlite_kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(1000, 0, -1))
    check = Check(sqlite_kit.database, sqlite_kit.clock, None, AT_ONCE)
    monkeypatch.setattr(check, "_unsent", lambda among: {str(n) for n in range(next(looks))})
    assert check.run().findings[0].count == 1000 - MAX_REPEATS


def test_repeated_check_covers_more_events_than_fit_into_one_statement(
    sqlite_kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [sqlite_kit.new_job().id for _ in range(7)]
    sent = update(OutboxEvent).where(OutboxEvent.aggregate_id.in_(ids[:3])).values(status="published")
    run(sqlite_kit, sent)
    sqlite_kit.advance(600)
    monkeypatch.setattr("aijobs.monitor.check.PAGE", 2)
    sqlite_kit.broker.lose_all()
    assert found(sqlite_kit, ask_broker=True) == {
        UNSENT.what: tuple(sorted(ids[3:])),
        LOST_MESSAGE: tuple(sorted(ids[:3])),
    }


def test_lease_within_the_grace_time_of_the_reaper_is_no_finding(
    sqlite: SqliteDatabases,
) -> None:
    with open_kit(scratch_database(sqlite), clock=ManualClock(BEGIN), lease_grace_s=600.0) as kit:
        job_id, _ = kit.job_in("running")
        bounds = Bounds.from_settings(kit.services.settings)
        reaper, check = LockReaper(kit.database, kit.lifecycle), Check(kit.database, kit.clock, None, bounds)
        kit.advance(60 + 200)
        assert (reaper.reap(), check.run().findings) == (0, ())
        kit.advance(600)
        assert [finding.job_ids for finding in check.run().findings] == [(job_id,)]


BOUNDS = [bound.name for bound in fields(Bounds)]
SLOW = {
    "lease_grace": {"lease_lost", "cancel", "open_call"},
    "reaper": {"lease_lost", "cancel", "open_call"},
    "lease": {"cancel", "open_call"},
    "watcher": {"cancel", "open_call"},
    "stuck_attempt": {"cancel", "open_call"},
    "claim_ttl": {"undelivered"},
    "claim_release": {"undelivered"},
    "handover_delay": {"undelivered"},
    "redrive_due": {"undelivered"},
    "redrive": {"undelivered", "redrive"},
    "dispatcher": {"undelivered", "redrive"},
}
"""The bounds that each setting extends."""


def settings(**values: float) -> Settings:
    return Settings(instance_path=Path("/nonexistent"), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SLOW)
def test_longer_settings_extend_the_bounds_of_the_check(name: str) -> None:
    usual, slow = Bounds.from_settings(settings()), Bounds.from_settings(settings(**{f"{name}_s": 3600.0}))
    longer = {bound for bound in BOUNDS if getattr(slow, bound) > getattr(usual, bound)}
    assert longer == SLOW[name]
    assert all(getattr(slow, bound) > timedelta(hours=1) for bound in longer)


def test_shorter_settings_never_shorten_the_bounds_of_the_check() -> None:
    hasty = Bounds.from_settings(settings(**{f"{name}_s": 0.01 for name in SLOW}))
    assert all(getattr(hasty, bound) >= getattr(Bounds(), bound) for bound in BOUNDS)


def test_finding_counts_all_jobs_and_names_the_first_few(kit: Kit) -> None:
    ids = {kit.job_in("cancelled")[0] for _ in range(5)}
    run(kit, update(AiJob).values(cancel_requested_at=None))
    (finding,) = Check(kit.database, kit.clock, None).run(show=2).findings
    assert finding.count == 5
    assert len(finding.job_ids) == 2
    assert set(finding.job_ids) <= ids
