"""Long work uses small transactions, and on SQLite a rest after each, so that others can write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, insert

from aijobs.credentials.rotation import CredentialRotation
from aijobs.credentials.store import CredentialStore
from aijobs.credentials.vault import CredentialVault
from aijobs.jobs.models import JobTombstone
from aijobs.settings import KeyRing
from aijobs.upkeep.cleanup import SnapshotCleanup
from aijobs.upkeep.reaper import LockReaper
from aijobs.upkeep.retention import Retention
from tests.support.databases import SERVERS
from tests.support.jobs import BEGIN, CREDENTIAL_KEYS, Kit
from tests.support.rows import build_job, ended

REST = "rest"
MOST_ROWS = 250
"""Maximum rows written in one transaction; SQLite writes about 20,000 per second."""
JOBS = 30


@contextmanager
def watched(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Record in order the number of rows that each transaction writes, and each `REST`."""
    seen: list[Any] = []
    written = [0]

    def executed(_conn: Any, cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith(("INSERT", "UPDATE", "DELETE")):
            written[0] += max(0, cursor.rowcount)

    def committed(_conn: Any) -> None:
        if written[0]:
            seen.append(written[0])
        written[0] = 0

    monkeypatch.setattr("aijobs.db.steps.sleep", lambda seconds: seen.append(REST))
    event.listen(kit.database.engine, "after_cursor_execute", executed)
    event.listen(kit.database.engine, "commit", committed)
    try:
        yield seen
    finally:
        event.remove(kit.database.engine, "after_cursor_execute", executed)
        event.remove(kit.database.engine, "commit", committed)


def _ended_jobs(kit: Kit, days: float) -> None:
    for _ in range(JOBS):
        kit.job_in("failed")
    kit.advance(days * 86_400)


def _prune(kit: Kit) -> Callable[[], object]:
    _ended_jobs(kit, 181)
    return Retention(
        kit.database,
        kit.clock,
        keep_jobs=timedelta(days=180),
        keep_tombstones=timedelta(days=1),
        keep_sessions=timedelta(days=1),
    ).run


def _prune_tombstones(kit: Kit) -> Callable[[], object]:
    row = {"user_id": "u1", "job_type": "synthetic", "request_hash": "h", "deleted_at": BEGIN}
    with kit.database.transaction() as session:
        session.execute(
            insert(JobTombstone), [{**row, "job_id": f"{n}", "idempotency_key": f"k{n}"} for n in range(600)]
        )
    kit.advance(2 * 86_400)
    return Retention(
        kit.database,
        kit.clock,
        keep_jobs=timedelta(days=180),
        keep_tombstones=timedelta(days=1),
        keep_sessions=timedelta(days=1),
    ).run


def _clean_up(kit: Kit) -> Callable[[], object]:
    _ended_jobs(kit, 31)
    return SnapshotCleanup(kit.database, kit.clock).run


def _rotate(kit: Kit) -> Callable[[], object]:
    for user in range(JOBS):
        kit.services.credentials.create(f"u{user}", f"sk-{user:012}")
    ring = KeyRing((("c2", b"n" * 32), *CREDENTIAL_KEYS.keys))
    vault = CredentialVault(ring, kit.services.settings.secret_key)
    return CredentialRotation(kit.database, CredentialStore(kit.clock, vault)).run


def _delete_credential(kit: Kit) -> Callable[[], object]:
    credential = kit.services.credentials.create("u1", "sk-000000000001")
    with kit.database.transaction() as session:
        session.add_all(build_job(**ended("failed"), credential_id=credential.id) for _ in range(150))
    return lambda: kit.services.credentials.delete("u1", credential.id)


def _reap(kit: Kit) -> Callable[[], object]:
    for _ in range(JOBS):
        kit.running()
    kit.advance(90)
    return LockReaper(kit.database, kit.lifecycle).reap


WORKS = {
    "retention of jobs": _prune,
    "retention of tombstones": _prune_tombstones,
    "cleanup of snapshots": _clean_up,
    "rotation of credentials": _rotate,
    "deletion of a credential of many jobs": _delete_credential,
    "takeover of expired leases": _reap,
}


@pytest.mark.parametrize("work", WORKS)
def test_on_sqlite_a_pass_rests_after_each_small_transaction(
    sqlite_kit: Kit, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WORKS[work](sqlite_kit)
    with watched(sqlite_kit, monkeypatch) as seen:
        run()
    steps = [one for one in seen if one != REST]
    assert len(steps) >= 2
    assert max(steps) <= MOST_ROWS
    last = len(seen) - 1 - seen[::-1].index(steps[-1])
    after = [seen[n + 1 : n + 2] for n, one in enumerate(seen) if one != REST and n < last]
    assert after == [[REST]] * (len(steps) - 1)


def test_rest_is_six_times_as_long_as_the_lock(sqlite_kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    from aijobs.db import steps

    times = iter([10.0, 10.2])
    rests: list[float] = []
    monkeypatch.setattr(steps, "monotonic", lambda: next(times))
    monkeypatch.setattr(steps, "sleep", rests.append)
    steps.Steps(sqlite_kit.database).write(lambda session: None)
    assert rests == [pytest.approx(1.2)]


@SERVERS
def test_on_a_server_a_pass_does_not_rest(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _clean_up(kit)
    with watched(kit, monkeypatch) as seen:
        run()
    assert REST not in seen
    assert len(seen) >= 2
