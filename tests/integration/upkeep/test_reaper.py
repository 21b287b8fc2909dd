"""The reaper: it takes expired leases and leases of dead processes, and asks for the next attempt."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError
from structlog.testing import capture_logs

from aijobs.ids import InstanceId
from aijobs.jobs.lease import Lease
from aijobs.jobs.models import AiJob
from aijobs.monitor.passes import read_passes
from aijobs.outbox.models import OutboxEvent
from aijobs.upkeep.pass_log import PassLog
from aijobs.upkeep.reaper import LockReaper
from tests.support.databases import ANY_DATABASE
from tests.support.effort import effort
from tests.support.jobs import BACKGROUND_TYPE, BEGIN, Kit, race
from tests.support.lost_commits import lose_commits
from tests.support.rows import build_job, held


def reaper(kit: Kit, **options: Any) -> LockReaper:
    return LockReaper(kit.database, kit.lifecycle, **options)


def asked(kit: Kit, job_id: str) -> OutboxEvent:
    """Return the job's newest enqueue event."""
    return kit.events(job_id, "ai.job.enqueue")[-1]


# --- expired leases --------------------------------------------------------------------------------------------------


def test_expired_lease_is_taken_90_seconds_after_its_last_renewal(kit: Kit) -> None:
    lease = kit.running()
    kit.advance(50)
    kit.lifecycle.extend_lock(lease)
    kit.advance(89.9)
    assert reaper(kit).reap() == 0
    assert kit.job(lease.job_id).locked_by == lease.token
    kit.advance(0.1)
    assert reaper(kit).reap() == 1
    job = kit.job(lease.job_id)
    assert (job.lifecycle_status, job.locked_by, job.uncharged_losses, job.retry_count) == ("running", None, 1, 0)
    assert job.lost_count == 0, "any job of that process may have killed it"
    assert kit.types(lease.job_id) == ["created", "locked", "lease_lost"]


@ANY_DATABASE
def test_lease_of_an_old_job_is_not_taken_before_it_expires(kit: Kit) -> None:
    lease = kit.running()
    kit.set(lease.job_id, locked_at=kit.job(lease.job_id).locked_at - timedelta(days=3))  # type: ignore[operator]
    kit.set(lease.job_id, started_at=kit.job(lease.job_id).started_at - timedelta(days=3))  # type: ignore[operator]
    assert reaper(kit).reap() == 0


@ANY_DATABASE
def test_reaper_ignores_jobs_without_a_lease(kit: Kit) -> None:
    for state in ("queued", "retrying", "succeeded", "failed", "cancelled"):
        kit.job_in(state)
    kit.advance(10_000)
    before = kit.everything()
    assert reaper(kit).reap() == 0
    assert kit.everything() == before


@pytest.mark.parametrize(
    ("job_type", "waits"),
    [("synthetic", [2, 4, 8, 16]), (BACKGROUND_TYPE, [5, 10, 20, 40])],
    ids=["interactive", "background"],
)
def test_wait_doubles_with_each_takeover_until_the_fifth_lost_worker_fails_the_job(
    kit: Kit, job_type: str, waits: list[int]
) -> None:
    job_id = kit.new_job(job_type=job_type).id
    for number, wait in enumerate(waits, start=1):
        lease = kit.lock(job_id, f"worker-{number}")
        assert lease.attempt_no == number
        kit.advance(90)
        assert reaper(kit).reap() == 1
        due = kit.clock.at + timedelta(seconds=wait)  # type: ignore[attr-defined]
        assert kit.job(job_id).next_attempt_at == due
        event = asked(kit, job_id)
        assert (event.status, event.available_at) == ("pending", due)
        assert event.dedupe_key.endswith(f":{number + 1}")
        kit.advance(wait)
    kit.lock(job_id, "the last")
    kit.advance(90)
    assert reaper(kit).reap() == 1
    job = kit.job(job_id)
    assert (job.lifecycle_status, job.error_code) == ("failed", "INTERNAL_WORKER_LOST")
    assert (job.lost_count, job.uncharged_losses, job.retry_count) == (0, 5, 0)
    assert job.public_error_message
    assert kit.types(job_id)[-2:] == ["lease_lost", "failed"]
    assert len(kit.events(job_id, "ai.job.failed")) == 1


@ANY_DATABASE
def test_job_with_a_saved_output_gets_one_more_attempt(kit: Kit) -> None:
    job_id = kit.new_job().id
    for number in range(2):
        lease = kit.lock(job_id)
        if number == 0:
            kit.lifecycle.save_output(lease, {"output": {}, "artifacts": 0})
        kit.lifecycle.charge(lease)
        kit.advance(10)
        assert kit.job(job_id).lifecycle_status == "running"
    kit.lifecycle.charge(kit.lock(job_id))
    assert kit.job(job_id).error_code == "INTERNAL_WORKER_LOST"


def test_lost_worker_of_a_cancelled_job_ends_it_as_cancelled(kit: Kit) -> None:
    job_id, _ = kit.job_in("cancel_requested")
    kit.advance(90)
    assert reaper(kit).reap() == 1
    job = kit.job(job_id)
    assert (job.lifecycle_status, job.error_code, job.locked_by) == ("cancelled", None, None)
    assert len(kit.events(job_id, "ai.job.cancelled")) == 1
    assert len(kit.events(job_id, "ai.job.enqueue")) == 1, "no next attempt is asked for"


@ANY_DATABASE
def test_leases_that_cannot_be_taken_stop_no_other(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = []
    for _ in range(9):
        leases.append(kit.running())
        kit.advance(1)
    kit.advance(90)
    bad = {lease.job_id for lease in leases[:4]}
    expire = kit.lifecycle.expire

    def fails(lease: Lease, *args: Any, **options: Any) -> AiJob:
        if lease.job_id in bad:
            raise OperationalError("UPDATE", {}, Exception("disk I/O error"))
        return expire(lease, *args, **options)

    monkeypatch.setattr(kit.lifecycle, "expire", fails)
    assert reaper(kit, page=2).reap() == 5
    assert {c.job_id for c in leases if kit.job(c.job_id).locked_by is not None} == bad


def test_leases_with_the_same_expiry_are_all_found(kit: Kit) -> None:
    leases = [kit.running() for _ in range(7)]
    kit.advance(90)
    assert reaper(kit, page=2).reap() == 7
    assert all(kit.job(lease.job_id).uncharged_losses == 1 for lease in leases)


def test_many_reapers_count_each_loss_once(live_kit: Kit) -> None:
    leases = [live_kit.running() for _ in range(12)]
    for lease in leases:
        live_kit.set(lease.job_id, lock_until=live_kit.job(lease.job_id).lock_until - timedelta(hours=1))  # type: ignore[operator]
    taken = race(*[reaper(live_kit, page=3).reap] * 4)
    assert sum(taken) == 12, taken
    for lease in leases:
        assert live_kit.job(lease.job_id).uncharged_losses == 1
        assert live_kit.types(lease.job_id) == ["created", "locked", "lease_lost"]


def test_reaper_takes_many_leases_in_one_transaction(kit: Kit) -> None:
    """With a COMMIT for each, 100,000 expired leases would take half an hour."""
    for _ in range(50):
        kit.running()
    kit.advance(90)
    commits: list[object] = []

    def count(connection: object) -> None:
        commits.append(connection)

    event.listen(kit.database.engine, "commit", count)
    try:
        assert reaper(kit, page=25).reap() == 50
    finally:
        event.remove(kit.database.engine, "commit", count)
    assert len(commits) == 2


def test_page_of_expired_leases_is_found_without_reading_earlier_ones(kit: Kit) -> None:
    """Leases that can't be taken now come before the others."""
    jobs = dead_leases(kit, 2000)
    last = kit.job(jobs[-1])
    assert last.lock_until is not None

    def measure(after: tuple[datetime, str] | None) -> int:
        return effort(kit.database.engine, lambda: kit.lifecycle.find_expired_locks(limit=5, after=after))

    first = min(measure(None) for _ in range(3))
    behind = (last.lock_until - timedelta(seconds=10), last.id)
    assert min(measure(behind) for _ in range(3)) < 3 * first


def dead_leases(kit: Kit, number: int, holder: str = "host~boot~1~1~1~dead") -> list[str]:
    """Create jobs with expired leases, each a second after the previous one."""
    begin = BEGIN - timedelta(days=1)
    rows = [held(locked_by=f"{holder}/{n:016x}", lock_until=begin + timedelta(seconds=n)) for n in range(number)]
    jobs = [build_job(event_seq=1, **row) for row in rows]
    ids = [job.id for job in jobs]
    with kit.database.transaction() as session:
        session.add_all(jobs)
    if kit.database.engine.dialect.name != "sqlite":
        kit.analyze("ai_jobs")
    return ids


@ANY_DATABASE
def test_lease_that_is_renewed_meanwhile_is_skipped_with_a_debug_line(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed, lost = kit.running(), kit.running()
    kit.advance(90)
    find = kit.lifecycle.find_expired_locks

    def find_then_renew(**options: Any) -> list[AiJob]:
        found = find(**options)
        if found:
            kit.lifecycle.extend_lock(renewed)
        return found

    monkeypatch.setattr(kit.lifecycle, "find_expired_locks", find_then_renew)
    with capture_logs() as lines:
        assert reaper(kit).reap() == 1
    assert kit.job(renewed.job_id).locked_by == renewed.token
    assert kit.job(lost.job_id).locked_by is None
    (line,) = [line for line in lines if line["event"] == "reaper.passed_over"]
    shown = {key: line[key] for key in ("log_level", "jobId", "attemptNo", "holder", "why")}
    assert shown == {
        "log_level": "debug",
        "jobId": renewed.job_id,
        "attemptNo": 1,
        "holder": "worker-1",
        "why": "LockLost",
    }


@pytest.mark.parametrize("when", ["before", "after"])
def test_batch_whose_commit_answer_is_lost_is_counted_once(kit: Kit, when: Any) -> None:
    leases = [kit.running() for _ in range(5)]
    kit.advance(90)
    with capture_logs() as lines, lose_commits(kit.database, when) as left:
        # The first COMMIT may be that of a read, which is cut too; then the next run reads again.
        with suppress(DBAPIError):
            reaper(kit).reap()
        reaper(kit).reap()
    assert left == [0]
    assert [kit.job(lease.job_id).uncharged_losses for lease in leases] == [1] * 5
    assert [line["event"] for line in lines].count("job.lease_lost") == 5


# --- long runs -------------------------------------------------------------------------------------------------------


@ANY_DATABASE
def test_reaper_with_progress_is_on_time_and_a_stopped_one_is_overdue(kit: Kit) -> None:
    dead_leases(kit, 4)
    states: list[str] = []

    def now_s() -> float:
        return (kit.clock.at - BEGIN).total_seconds()  # type: ignore[attr-defined,no-any-return]

    log = PassLog(kit.database, kit.clock, now_s)

    def record_state() -> None:
        log.progress("reaper", 30.0)()
        with kit.database.read() as session:
            (row,) = read_passes(session, kit.clock, ("reaper",))
        states.append(row.state)
        kit.advance(60)

    log.run("reaper", 30.0, reaper(kit, page=1, progress=record_state).reap)
    assert states == ["on_time"] * 4
    kit.advance(101)
    with kit.database.read() as session:
        (row,) = read_passes(session, kit.clock, ("reaper",))
    assert row.state == "overdue"


@ANY_DATABASE
def test_progress_does_not_reset_the_count_of_failures(kit: Kit) -> None:
    def fail() -> None:
        raise TypeError

    log = PassLog(kit.database, kit.clock)
    with pytest.raises(TypeError):
        log.run("reaper", 30.0, fail)
    PassLog(kit.database, kit.clock).progress("reaper", 30.0)()
    with kit.database.read() as session:
        (row,) = read_passes(session, kit.clock, ("reaper",))
    assert (row.state, row.failures) == ("failing", 1)


# --- leases of dead processes ----------------------------------------------------------------------------------------


def dead_process() -> InstanceId:
    """Return the instance id of a process of this host that has ended."""
    code = "from aijobs.ids import InstanceId; print(InstanceId.current())"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    parsed = InstanceId.parse(text)
    assert parsed is not None
    return parsed


def test_lease_of_a_dead_process_on_this_host_is_taken_at_once(kit: Kit) -> None:
    job_id = kit.new_job().id
    kit.lock(job_id, str(dead_process()))
    assert reaper(kit).reap_dead(InstanceId.current()) == 1
    job = kit.job(job_id)
    assert (job.lifecycle_status, job.locked_by, job.uncharged_losses) == ("running", None, 1), "counted as lost"
    assert job.next_attempt_at == asked(kit, job_id).available_at == kit.clock.at  # type: ignore[attr-defined]
    assert kit.lock(job_id, "worker-2").attempt_no == 2, "the next attempt is due at once"


@ANY_DATABASE
def test_fifth_death_of_its_process_fails_a_job(kit: Kit) -> None:
    job_id = kit.new_job().id
    for _ in range(5):
        kit.lock(job_id, str(dead_process()))
        reaper(kit).reap_dead(InstanceId.current())
    assert kit.job(job_id).error_code == "INTERNAL_WORKER_LOST"


@ANY_DATABASE
def test_lease_of_an_earlier_instance_with_the_same_pid_is_taken(kit: Kit) -> None:
    """A restart by exec keeps pid and start time."""
    current = InstanceId.current()
    job_id = kit.new_job().id
    kit.lock(job_id, str(replace(current, nonce="00000000")))
    own = kit.new_job().id
    kit.lock(own, str(current))
    assert reaper(kit).reap_dead(current) == 1
    assert kit.job(job_id).locked_by is None
    assert kit.job(own).locked_by is not None


@pytest.mark.parametrize(
    "differs",
    [{"host": "elsewhere"}, {"boot": "000000000000"}, {"pid_namespace": "1"}, {"boot": ""}, {"pid_namespace": ""}],
    ids=lambda d: "-".join(f"{k} {v or 'unknown'}" for k, v in d.items()),
)
@ANY_DATABASE
def test_lease_of_another_host_boot_or_namespace_is_not_taken_early(kit: Kit, differs: dict[str, str]) -> None:
    job_id = kit.new_job().id
    kit.lock(job_id, str(replace(dead_process(), **differs)))
    assert reaper(kit).reap_dead(InstanceId.current()) == 0
    assert kit.job(job_id).locked_by is not None
    kit.advance(90)
    assert reaper(kit).reap() == 1, "it is taken when it expires"


@ANY_DATABASE
def test_lease_of_a_live_process_is_not_taken_by_reap_dead(kit: Kit) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "from aijobs.ids import InstanceId; print(InstanceId.current(), flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        job_id = kit.new_job().id
        kit.lock(job_id, child.stdout.readline().strip())
        kit.advance(10_000)
        assert reaper(kit).reap_dead(InstanceId.current()) == 0
        assert kit.job(job_id).losses == 0
        child.communicate("\n", timeout=10)


@ANY_DATABASE
def test_lease_of_an_unknown_instance_is_not_taken_early(kit: Kit) -> None:
    host = InstanceId.current().host
    for name in ("worker-1", f"{host}~only~three", f"{host}~b~1~nopid~5~ab"):
        kit.lock(kit.new_job().id, name)
    assert reaper(kit).reap_dead(InstanceId.current()) == 0


@ANY_DATABASE
def test_host_name_is_not_treated_as_a_like_pattern(kit: Kit) -> None:
    dead = dead_process()
    job_id = kit.new_job().id
    kit.lock(job_id, str(replace(dead, host="host_a")))
    observer = replace(InstanceId.current(), host="host%")
    assert reaper(kit).reap_dead(observer) == 0
    assert kit.job(job_id).losses == 0


def test_concurrent_starts_count_each_loss_once(live_kit: Kit) -> None:
    gone = dead_process()
    jobs = [live_kit.new_job().id for _ in range(10)]
    for job_id in jobs:
        live_kit.lock(job_id, str(gone))
    taken = race(*[lambda: reaper(live_kit).reap_dead(InstanceId.current())] * 4)
    assert sum(taken) == 10, taken
    assert {live_kit.job(job_id).uncharged_losses for job_id in jobs} == {1}


@ANY_DATABASE
@pytest.mark.parametrize(
    ("holder", "hidden"),
    [({"pid_namespace": "1"}, True), ({"boot": "1"}, True), ({}, False), ({"host": "another", "boot": "1"}, False)],
    ids=["of another container", "of another boot", "of the same", "of another host"],
)
def test_lease_of_an_invisible_process_of_this_host_is_found(kit: Kit, holder: dict[str, str], hidden: bool) -> None:
    current = InstanceId.current()
    for _ in range(3):
        kit.lock(kit.new_job().id, str(current))
    kit.lock(kit.new_job().id, str(replace(current, **holder)))  # type: ignore[arg-type]
    assert reaper(kit, page=2).finds_hidden(current) is hidden


def test_starting_consumer_skips_leases_of_processes_that_may_live(kit: Kit) -> None:
    """Leases of another container with the same host name are skipped as a whole; there may be a million."""
    current = InstanceId.current()
    first, second = kit.new_job().id, kit.new_job().id
    kit.lock(first, str(dead_process()))
    observe = reaper(kit).reap_dead
    before = effort(kit.database.engine, lambda: observe(current))
    dead_leases(kit, 3000, str(replace(dead_process(), pid_namespace="1")))
    kit.lock(second, str(dead_process()))
    assert effort(kit.database.engine, lambda: observe(current)) < 6 * before
    assert [kit.job(job_id).uncharged_losses for job_id in (first, second)] == [1, 1]


@ANY_DATABASE
def test_all_leases_of_several_dead_processes_are_taken(kit: Kit) -> None:
    gone = [str(replace(dead_process(), nonce=f"{n:08x}")) for n in range(3)]
    for holder in gone:
        for _ in range(5):
            kit.lock(kit.new_job().id, holder)
    current = InstanceId.current()
    kit.lock(kit.new_job().id, str(current))
    assert reaper(kit, page=2).reap_dead(current) == 15
