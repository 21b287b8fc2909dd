"""Servers that stop answering and rows that stay locked: every wait is limited, except for schema upgrades."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import DBAPIError

from aijobs.db import engines as db_engine
from aijobs.db.database import Database
from aijobs.db.engines import build_engine
from aijobs.jobs.models import AiJob
from tests.support.databases import SERVERS, Databases
from tests.support.jobs import Kit, open_kit, prepare_database

LOCK_WAIT = {"postgresql": "SHOW lock_timeout", "mariadb": "SELECT @@innodb_lock_wait_timeout"}


@SERVERS
def test_wait_for_a_locked_row_is_limited(kit: Kit, database_server: Databases) -> None:
    with kit.database.read() as session:
        limit = session.execute(text(LOCK_WAIT[database_server.kind])).scalar_one()
    assert int(str(limit).removesuffix("s")) == db_engine.LOCK_WAIT_S


@pytest.mark.long
@SERVERS
def test_unit_fails_if_a_row_stays_locked(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db_engine, "LOCK_WAIT_S", 1)
    job_id = kit.new_job().id
    runs: list[int] = []
    impatient = Database(kit.url)

    def touch(session: Any) -> None:
        runs.append(1)
        session.execute(update(AiJob).where(AiJob.id == job_id).values(priority=7))

    try:
        with kit.database.transaction() as holder:
            holder.execute(select(AiJob.id).where(AiJob.id == job_id).with_for_update())
            with pytest.raises(DBAPIError):
                impatient.write(touch)
        assert len(runs) == 5
        impatient.write(touch)
    finally:
        impatient.dispose()
    assert kit.job(job_id).priority == 7


@pytest.mark.postgres
def test_connection_to_a_vanished_postgres_host_is_closed_by_the_kernel(postgres: Any) -> None:
    engine = build_engine(postgres.create_database())
    try:
        with engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            with socket.socket(fileno=socket.dup(driver.pgconn.socket)) as wire:
                asked = [wire.getsockopt(socket.IPPROTO_TCP, option) for option in KEEPALIVE]
                assert wire.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert connection.execute(text("SHOW lock_timeout")).scalar() == f"{db_engine.LOCK_WAIT_S}s"
    finally:
        engine.dispose()
    idle, interval, count, unacknowledged = asked
    assert idle + interval * count <= db_engine.ANSWER_S
    assert unacknowledged == db_engine.ANSWER_S * 1000


KEEPALIVE = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)


@pytest.mark.mariadb
def test_silent_mariadb_times_out(mariadb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mariadb.ensure_running()
    monkeypatch.setattr(db_engine, "ANSWER_S", 1)
    url = mariadb.create_database(prepare_database)
    outcome: list[BaseException | None] = []
    with open_kit(url) as kit:
        job_id = kit.new_job().id

        def read() -> None:
            try:
                kit.job(job_id)
            except DBAPIError as error:
                outcome.append(error)

        reader = threading.Thread(target=read, daemon=True)
        mariadb.freeze()
        try:
            reader.start()
            reader.join(30)
        finally:
            mariadb.thaw()
        assert not reader.is_alive(), "the reader still waits"
        assert outcome
        assert kit.lock(job_id).attempt_no == 1, "the next statement gets a fresh connection"
    mariadb.drop_database(url)


@pytest.mark.long
@SERVERS
def test_schema_upgrade_may_wait_longer_than_a_unit_of_work(
    create_database: Callable[..., str], database_server: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines upgrade at the same time, and the first one's tables are large."""
    monkeypatch.setattr(db_engine, "LOCK_WAIT_S", 1)
    monkeypatch.setattr(db_engine, "ANSWER_S", 1)
    wait = {"postgresql": "SELECT pg_advisory_xact_lock(1)", "mariadb": "SELECT GET_LOCK('one', 60)"}
    url = create_database()
    first, second = (build_engine(url, patient=True) for _ in range(2))
    done: list[object] = []

    def upgrade() -> None:
        with second.connect() as connection:
            done.append(connection.execute(text(wait[database_server.kind])).scalar())

    other = threading.Thread(target=upgrade, daemon=True)
    with first.connect() as connection:
        connection.execute(text(wait[database_server.kind]))
        other.start()
        time.sleep(2.5)  # Longer than the limits above, neither of which may end the wait.
        assert other.is_alive()
    first.dispose()
    other.join(30)
    second.dispose()
    assert len(done) == 1
