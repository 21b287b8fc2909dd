"""A unit of work has one effect, in spite of deadlocks, lost connections and lost answers to COMMIT."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, event, select, text, update
from sqlalchemy.exc import DBAPIError, OperationalError

from aijobs.db.clock import ManualClock
from aijobs.db.database import Database, savepoint
from aijobs.db.statements import change_rows
from aijobs.jobs.lease import JobErrorInfo, Locked
from aijobs.jobs.models import AiJob, QuotaUsage
from aijobs.jobs.requests import CreatedJob
from aijobs.upkeep.reaper import LockReaper
from tests.support.databases import SERVERS, Databases
from tests.support.jobs import BEGIN, Kit, open_kit, prepare_database, race
from tests.support.lost_commits import late_commit, lose_commits
from tests.support.polling import poll

ERROR = JobErrorInfo.of("PROVIDER_UNAVAILABLE", "no route")

UNITS: dict[str, tuple[str, Callable[[Kit, Any], Any], list[str]]] = {
    "lock_job": ("queued", lambda kit, c: kit.lifecycle.lock_job(c.job_id, "worker-2"), ["locked"]),
    "extend_lock": ("running", lambda kit, c: kit.lifecycle.extend_lock(c), []),
    "report_progress": ("running", lambda kit, c: kit.lifecycle.report_progress(c, 50), []),
    "save_output": ("running", lambda kit, c: kit.lifecycle.save_output(c, {"paid": 1}), ["output_saved"]),
    "mark_succeeded": ("running", lambda kit, c: kit.lifecycle.mark_succeeded(c), ["succeeded"]),
    "mark_failed": ("running", lambda kit, c: kit.lifecycle.mark_failed(c, ERROR), ["failed"]),
    "mark_cancelled": ("cancel_requested", lambda kit, c: kit.lifecycle.mark_cancelled(c), ["cancelled"]),
    "a cancel that waits": ("running", lambda kit, c: kit.jobs.cancel(c.job_id, "user:u1"), ["cancel_requested"]),
    "a cancel at once": (
        "queued",
        lambda kit, c: kit.jobs.cancel(c.job_id, "user:u1"),
        ["cancel_requested", "cancelled"],
    ),
    "release": ("running", lambda kit, c: kit.lifecycle.release(c), ["released"]),
    "release of a cancelled job": ("cancel_requested", lambda kit, c: kit.lifecycle.release(c), ["cancelled"]),
    "release_for_retry": (
        "running",
        lambda kit, c: kit.lifecycle.release_for_retry(c, BEGIN + timedelta(seconds=9)),
        ["retry_scheduled"],
    ),
    "expire": ("running", lambda kit, c: kit.lifecycle.expire(c, kit.job(c.job_id).lock_until), ["lease_lost"]),
    "give_up": ("queued", lambda kit, c: kit.lifecycle.give_up(c.job_id, 1, ERROR), ["locked", "failed"]),
    "retry": ("failed", lambda kit, c: kit.jobs.retry(c.job_id, "operator:ann"), []),
}


@pytest.mark.parametrize("when", ["before", "after"])
def test_commit_with_a_lost_answer_is_confirmed_by_reading(kit: Kit, when: Any) -> None:
    for name, (state, unit, added) in UNITS.items():
        expected = _undisturbed(kit, state, unit)
        job_id, lease = kit.job_in(state)
        recorded, before = kit.types(job_id), kit.counts()
        with lose_commits(kit.database, when) as left:
            answer = unit(kit, lease)
        assert left == [0], f"{name}: no commit was lost"
        assert kit.types(job_id) == recorded + added, f"{name}, lost {when} it took effect"
        assert _without_names(kit.row(job_id)) == expected, f"{name}, lost {when} it took effect"
        job = answer.job if isinstance(answer, CreatedJob | Locked) else answer
        if isinstance(job, str):
            assert job == kit.job(job_id).output_hash
        elif job is not None:
            assert job.lifecycle_status == kit.job(job.id).lifecycle_status
        grown = kit.counts()
        assert grown["ai_jobs"] - before["ai_jobs"] == (1 if name == "retry" else 0)


def _undisturbed(kit: Kit, state: str, unit: Callable[[Kit, Any], Any]) -> dict[str, Any]:
    job_id, lease = kit.job_in(state)
    unit(kit, lease)
    return _without_names(kit.row(job_id))


def _without_names(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("id", "root_id")} | {
        "locked_by": row["locked_by"] and row["locked_by"].rpartition("/")[0]
    }


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("key", [None, "k"])
def test_job_whose_commit_was_lost_exists_once_and_is_sent(kit: Kit, when: Any, key: str | None) -> None:
    kit.create()
    before, sent = kit.counts(), kit.broker.pending_count("ai-interactive")
    with lose_commits(kit.database, when):
        created = kit.create(idempotency_key=key)
    assert created.created
    assert {name: count - before[name] for name, count in kit.counts().items()} == {
        name: 0 if name == "quota_usage" else 1 for name in before
    }
    assert kit.types(created.job.id) == ["created"]
    assert kit.broker.pending_count("ai-interactive") == sent + 1


@pytest.mark.long
def test_late_commit_is_the_only_effect_and_its_own_result(kit: Kit) -> None:
    """The first read doesn't see the commit yet, so the unit runs again and meets its own effect."""
    for name, (state, unit, added) in UNITS.items():
        expected = _undisturbed(kit, state, unit)
        job_id, lease = kit.job_in(state)
        recorded, before = kit.types(job_id), kit.counts()
        with late_commit(kit.database) as left:
            answer = unit(kit, lease)
        assert left == [0], f"{name}: no commit was late"
        assert kit.types(job_id) == recorded + added, name
        assert _without_names(kit.row(job_id)) == expected, name
        if isinstance(answer, CreatedJob):
            assert answer.created, f"{name}: the child was created by this request"
        assert kit.counts()["ai_jobs"] - before["ai_jobs"] == (1 if name == "retry" else 0), name


@pytest.mark.parametrize("key", [None, "k"])
def test_job_whose_commit_was_late_exists_once_and_counts_as_created(kit: Kit, key: str | None) -> None:
    kit.create()
    before = kit.counts()
    with late_commit(kit.database) as left:
        created = kit.create(idempotency_key=key)
    assert left == [0]
    assert created.created
    assert kit.counts()["ai_jobs"] == before["ai_jobs"] + 1
    assert kit.types(created.job.id) == ["created"]


def test_commit_is_confirmed_after_the_database_is_back(kit: Kit) -> None:
    lease = kit.running()
    refused = [3]

    def refuse(_dialect: Any, _record: Any, _args: Any, _kwargs: Any) -> None:
        if lost == [0] and refused[0]:
            refused[0] -= 1
            kind: Any = kit.database.engine.dialect.dbapi
            raise kind.OperationalError("connection refused")

    event.listen(kit.database.engine, "do_connect", refuse)
    kit.database.dispose()  # Now each read needs a new connection.
    try:
        with lose_commits(kit.database, "after") as lost:
            job = kit.lifecycle.mark_succeeded(lease)
    finally:
        event.remove(kit.database.engine, "do_connect", refuse)
    assert refused == [0]
    assert job.lifecycle_status == "succeeded"
    assert kit.types(lease.job_id) == ["created", "locked", "succeeded"]


def test_lost_answer_for_a_users_first_quota_row_does_no_harm(kit: Kit) -> None:
    with lose_commits(kit.database, "after"):
        assert kit.create(user_id="new").created
    assert kit.counts()["quota_usage"] == 1


def test_commit_lost_at_the_last_try_is_confirmed(kit: Kit) -> None:
    job_id = kit.new_job().id
    failures = [4]

    def inject(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("UPDATE ai_jobs") and failures[0]:
            failures[0] -= 1
            raise OperationalError("…", None, Exception("database is locked"))

    event.listen(kit.database.engine, "before_cursor_execute", inject)
    try:
        with lose_commits(kit.database, "after"):
            job = kit.lifecycle.lock_job(job_id, "worker-1").job
    finally:
        event.remove(kit.database.engine, "before_cursor_execute", inject)
    assert (job.locked_by, job.attempt_no) == (kit.job(job_id).locked_by, 1)


def test_repeatedly_lost_commits_raise_without_a_second_effect(kit: Kit) -> None:
    lease = kit.running()
    with lose_commits(kit.database, "before", times=5), pytest.raises(DBAPIError):
        kit.lifecycle.mark_succeeded(lease)
    assert kit.types(lease.job_id) == ["created", "locked"]
    with lose_commits(kit.database, "before", times=4):
        kit.lifecycle.mark_succeeded(lease)
    assert kit.types(lease.job_id) == ["created", "locked", "succeeded"]


# --- deadlocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("within_savepoint", [False, True])
def test_unit_is_repeated_after_a_deadlock(kit: Kit, within_savepoint: bool) -> None:
    """Two units lock two rows in opposite order; a lost savepoint must not hide the deadlock."""
    first, second = kit.new_job().id, kit.new_job().id
    meet = threading.Barrier(2)
    runs: list[str] = []

    def crossing(one: str, other: str) -> Callable[[Any], None]:
        def work(session: Any) -> None:
            runs.append(one)
            _touch(session, one)
            if len(runs) <= 2 and kit.database.engine.dialect.name != "sqlite":
                meet.wait(20)
            if within_savepoint:
                with savepoint(session):
                    _touch(session, other)
            else:
                _touch(session, other)

        return work

    outcomes = race(
        lambda: kit.database.write(crossing(first, second)), lambda: kit.database.write(crossing(second, first))
    )
    assert outcomes == [None, None]
    assert [kit.job(job_id).priority for job_id in (first, second)] == [52, 52]
    if kit.database.engine.dialect.name == "sqlite":
        assert len(runs) == 2, "SQLite has one writer and no deadlocks"
    else:
        # More than three if the survivor was slow and they met again.
        assert len(runs) >= 3, "there was no deadlock"


def _touch(session: Any, job_id: str) -> None:
    assert change_rows(session, update(AiJob).where(AiJob.id == job_id).values(priority=AiJob.priority + 1)) == 1


def test_concurrent_create_cancel_and_lock_raise_no_lock_error(live_kit: Kit) -> None:
    kit = live_kit
    ids = [kit.new_job().id for _ in range(4)]

    def worker(number: int) -> list[str]:
        for n in range(6):
            kit.create(idempotency_key=f"k{n}")
            job_id = ids[(n + number) % len(ids)]
            if number % 2:
                kit.jobs.cancel(job_id, "user:u1")
            else:
                kit.create(user_id=f"u{number}")
        return ["done"]

    assert race(*(lambda n=n: worker(n) for n in range(6))) == [["done"]] * 6
    assert len([row for row in kit.rows("ai_jobs") if row["idempotency_key"]]) == 6


# --- connections that die ------------------------------------------------------------------------------------------


@SERVERS
def test_unit_is_repeated_after_its_connection_was_killed(kit: Kit, database_server: Databases) -> None:
    job_id = kit.new_job().id
    runs: list[int] = []

    def work(session: Any) -> int:
        number = session.execute(text(_CONNECTION_NUMBER[database_server.kind])).scalar_one()
        runs.append(number)
        _touch(session, job_id)
        if len(runs) == 1:
            _kill(database_server, number)
        _touch(session, job_id)
        return number

    assert kit.database.write(work) == runs[-1]
    assert len(runs) == 2
    assert kit.job(job_id).priority == 52
    _kill(database_server, runs[-1])
    assert kit.lifecycle.lock_job(job_id, "worker-1").job.attempt_no == 1, (
        "a connection that died in the pool is replaced"
    )


@SERVERS
def test_connection_killed_during_a_read_does_not_affect_the_next_unit(kit: Kit, database_server: Databases) -> None:
    with kit.database.read() as session:
        _kill(database_server, session.execute(text(_CONNECTION_NUMBER[database_server.kind])).scalar_one())
        with pytest.raises(DBAPIError):
            session.execute(text("SELECT 1"))
    assert kit.new_job().lifecycle_status == "queued"


@SERVERS
def test_idle_connection_that_died_is_not_given_to_a_reader(
    kit: Kit, database_server: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aijobs.db.engines.FRESH_S", 0.0)  # Every idle connection is tested before use.
    number = text(_CONNECTION_NUMBER[database_server.kind])
    with ExitStack() as stack:
        readers = [stack.enter_context(kit.database.read()) for _ in range(3)]
        dead = {reader.execute(number).scalar_one() for reader in readers}
    for one in dead:
        _kill(database_server, one)
    for _ in dead:
        with kit.database.read() as session:
            assert session.execute(number).scalar_one() not in dead


@SERVERS
def test_migration_of_a_column_breaks_no_running_worker(kit: Kit, database_server: Databases) -> None:
    """A migration while workers run: on PostgreSQL their connections have statements prepared for the old column."""
    change = {"postgresql": "ALTER COLUMN word TYPE", "mariadb": "MODIFY word"}[database_server.kind]

    def look(session: Any) -> Any:
        return session.execute(text("SELECT word FROM moving")).scalar_one()

    with kit.database.engine.connect() as migration:
        for statement in ("CREATE TABLE moving (word varchar(10))", "INSERT INTO moving VALUES ('here')"):
            migration.execute(text(statement))
        migration.commit()
        try:
            for length, work in ((20, kit.database.query), (30, kit.database.write)):
                for _ in range(PREPARED_AFTER):
                    assert work(look) == "here"
                migration.execute(text(f"ALTER TABLE moving {change} varchar({length})"))
                migration.commit()
                assert work(look) == "here"
        finally:
            migration.execute(text("DROP TABLE moving"))
            migration.commit()


PREPARED_AFTER = 7
"""The driver prepares a statement after its fifth execution."""
_CONNECTION_NUMBER = {"postgresql": "SELECT pg_backend_pid()", "mariadb": "SELECT CONNECTION_ID()"}


def _kill(server: Any, number: int) -> None:
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT pg_terminate_backend({number})" if server.kind == "postgresql" else f"KILL {number}")


# --- rules of a unit -----------------------------------------------------------------------------------------------


def test_unit_that_raises_its_own_error_is_not_repeated(kit: Kit) -> None:
    runs = []

    def work(session: Any) -> None:
        runs.append(1)
        session.add(QuotaUsage(user_id="u", created_at=BEGIN))
        session.flush()
        raise LookupError("mine")

    with pytest.raises(LookupError):
        kit.database.write(work)
    assert runs == [1]
    assert kit.counts() == {}


def test_unit_with_a_wrong_statement_is_not_repeated(kit: Kit) -> None:
    runs = []

    def work(session: Any) -> None:
        runs.append(1)
        session.execute(text("SELECT nonsense FROM nowhere"))

    with pytest.raises(DBAPIError):
        kit.database.write(work)
    assert runs == [1]


def test_savepoint_is_rolled_back_alone(kit: Kit) -> None:
    def work(session: Any) -> None:
        session.add(QuotaUsage(user_id="kept", created_at=BEGIN))
        with suppress(LookupError), savepoint(session):
            session.add(QuotaUsage(user_id="lost", created_at=BEGIN))
            session.flush()
            raise LookupError

    kit.database.write(work)
    assert [row["user_id"] for row in kit.rows("quota_usage")] == ["kept"]


def test_sqlite_uses_wal_with_full_sync_and_a_busy_timeout(sqlite_kit: Kit) -> None:
    with sqlite_kit.database.engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


def test_sqlite_writer_locks_at_its_start_and_readers_never_lock(sqlite_kit: Kit) -> None:
    kit, other = sqlite_kit, Database(sqlite_kit.url)
    try:
        with kit.database.transaction() as session:
            session.execute(text("SELECT 1"))
            with other.engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA busy_timeout=0")
                assert connection.exec_driver_sql("SELECT count(*) FROM ai_jobs").scalar() == 0
                with pytest.raises(OperationalError, match="locked"):
                    connection.exec_driver_sql("INSERT INTO quota_usage VALUES ('u', '2026-01-01 00:00:00.000')")
    finally:
        other.dispose()


@SERVERS
def test_mariadb_and_postgres_use_read_committed(kit: Kit, database_server: Databases) -> None:
    query = {
        "postgresql": "SHOW transaction_isolation",
        "mariadb": "SELECT replace(lower(@@tx_isolation), '-', ' ')",
    }[database_server.kind]
    with kit.database.read() as session:
        assert session.execute(text(query)).scalar() == "read committed"


def _by_writing(connection: Connection, job_id: str) -> None:
    connection.execute(update(AiJob).where(AiJob.id == job_id).values(progress=50))


def _by_reading(connection: Connection, job_id: str) -> None:
    connection.execute(select(AiJob.id).where(AiJob.id == job_id).with_for_update())


@pytest.mark.parametrize("hold", [_by_writing, _by_reading])
@pytest.mark.parametrize(
    "server", [pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("mariadb", marks=pytest.mark.mariadb)]
)
def test_idle_transaction_of_a_worker_does_not_block_the_reaper(
    server: str, hold: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that lost power doesn't close its connections, and TCP alone notices only after hours."""
    databases = request.getfixturevalue(server)
    databases.ensure_running()
    monkeypatch.setattr("aijobs.db.engines.IDLE_TRANSACTION_S", 1)
    url = databases.create_database(prepare_database)
    with open_kit(url, clock=ManualClock(BEGIN)) as kit, open_kit(url, clock=ManualClock(BEGIN)) as silent:
        lease = kit.running()
        kit.advance(90)
        with silent.database.engine.connect() as connection:
            hold(connection, lease.job_id)
            reaper = LockReaper(kit.database, kit.lifecycle)
            assert reaper.reap() == 0
            poll(lambda: reaper.reap() == 1, what="the server ended the silent transaction")
            with pytest.raises(DBAPIError):
                hold(connection, lease.job_id)
        assert (kit.job(lease.job_id).uncharged_losses, kit.job(lease.job_id).progress) == (1, 0)
    databases.drop_database(url)
