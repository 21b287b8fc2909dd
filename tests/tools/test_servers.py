"""The servers that tests use: they start, answer, and restart after a crash."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
import redis
import sqlalchemy as sa

from tests.support.databases import Databases, MariaDbServer, PostgresServer
from tests.support.servers import ServerMissing, ValkeyServer, skip_or_fail


def fill_with_parent_and_child(url: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE parent (id INTEGER PRIMARY KEY, name VARCHAR(20))"))
        connection.execute(
            sa.text(
                "CREATE TABLE child (id INTEGER PRIMARY KEY, parent_id INTEGER NOT NULL,"
                " twice INTEGER GENERATED ALWAYS AS (parent_id * 2) STORED,"
                " FOREIGN KEY (parent_id) REFERENCES parent (id))"
            )
        )
        connection.execute(sa.text("INSERT INTO parent VALUES (1, '卡片')"))
        connection.execute(sa.text("INSERT INTO child (id, parent_id) VALUES (7, 1)"))
    engine.dispose()


def rows(url: str, query: str) -> list[tuple]:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(sa.text(query))]
    engine.dispose()
    return found


def test_missing_server_skips_the_test_or_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ServerMissing("no MariaDB: mariadbd is missing")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="mariadbd is missing"):
        skip_or_fail(missing)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="every server must be installed"):
        skip_or_fail(missing)


def test_broker_is_empty_for_each_test(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("left", "behind")
        assert client.get("left") == b"behind"


def test_broker_is_empty_after_another_test_wrote_to_it(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("left", "behind")


def test_restarted_broker_keeps_its_address_and_loses_its_data(redis_url: str, valkey: ValkeyServer) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set("key", "value")
        valkey.restart()
        assert client.get("key") is None
    assert valkey.url == redis_url


def test_killed_broker_is_started_for_the_next_test(valkey: ValkeyServer) -> None:
    valkey.ensure_running()
    valkey.kill()
    with pytest.raises(redis.ConnectionError):
        valkey.client().ping()
    valkey.ensure_running()
    assert valkey.client().ping()


def test_frozen_broker_accepts_connections_and_answers_nothing(
    start_valkey: Callable[..., ValkeyServer],
) -> None:
    own = start_valkey()
    own.freeze()
    with redis.Redis(port=own.port, socket_timeout=0.2, retry=None) as client:
        with pytest.raises(redis.TimeoutError):
            client.ping()
        own.thaw()
        assert client.ping()


def test_own_broker_can_have_an_acl(start_valkey: Callable[..., ValkeyServer]) -> None:
    own = start_valkey("user worker on >secret ~aijobs:* +get +set +client|setinfo", "user default off")
    with redis.Redis.from_url(own.url_for("worker", "secret")) as client:
        client.set("aijobs:a", "1")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("other", "1")


def test_each_kind_of_database_answers_and_starts_empty(database_url: str) -> None:
    engine = sa.create_engine(database_url)
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()
    fill_with_parent_and_child(database_url)
    assert rows(database_url, "SELECT id, twice FROM child") == [(7, 2)]


def test_prepared_databases_have_rows_and_keys_and_are_separate(create_database: Callable[..., str]) -> None:
    first = create_database(fill_with_parent_and_child)
    second = create_database(fill_with_parent_and_child)
    assert first != second
    engine = sa.create_engine(first)
    (key,) = sa.inspect(engine).get_foreign_keys("child")
    assert key["referred_table"] == "parent"
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM child"))
    engine.dispose()
    assert rows(first, "SELECT id FROM child") == []
    assert rows(second, "SELECT child.id, name, twice FROM child JOIN parent ON parent.id = parent_id") == [
        (7, "卡片", 2)
    ]


def test_database_with_an_open_transaction_can_be_dropped(database_server: Databases) -> None:
    url = database_server.create_database(fill_with_parent_and_child)
    engine = sa.create_engine(url)
    connection = engine.connect()
    connection.execute(sa.text("SELECT * FROM child")).all()
    database_server.drop_database(url)
    connection.invalidate()
    connection.close()
    engine.dispose()
    again = database_server.create_database()
    assert again != url
    database_server.drop_database(again)


@pytest.mark.mariadb
def test_mariadb_compares_texts_by_code_point(mariadb: MariaDbServer) -> None:
    url = mariadb.create_database()
    compared = rows(url, "SELECT 'k' = 'K', 'k' = 'k ', 'e' = 'é', @@time_zone")
    assert compared[0][3] == "+08:00"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE t (k VARCHAR(20) UNIQUE)"))
        connection.execute(sa.text("INSERT INTO t VALUES ('k'), ('K'), ('k '), ('e'), ('é')"))
        assert connection.execute(sa.text("SELECT count(*) FROM t")).scalar_one() == 5
    engine.dispose()
    mariadb.drop_database(url)


@pytest.mark.mariadb
def test_restarted_mariadb_keeps_committed_data(mariadb: MariaDbServer) -> None:
    url = mariadb.create_database(fill_with_parent_and_child)
    mariadb.restart()
    assert rows(url, "SELECT id FROM child") == [(7,)]
    mariadb.drop_database(url)


@pytest.mark.postgres
def test_restarted_postgres_keeps_committed_data(postgres: PostgresServer) -> None:
    url = postgres.create_database(fill_with_parent_and_child)
    postgres.restart()
    assert rows(url, "SELECT id FROM child") == [(7,)]
    assert rows(url, "SHOW timezone") == [("Asia/Shanghai",)]
    postgres.drop_database(url)


def test_killed_postgres_restarts_on_its_port_while_one_of_its_processes_still_ends(
    postgres: PostgresServer,
) -> None:
    """PostgreSQL reports that its shared memory is in use; that doesn't mean that its port is taken."""
    port = postgres.port
    with postgres.connect() as connection:
        pid = connection.info.backend_pid
        os.kill(pid, signal.SIGSTOP)
        postgres.kill()
        late = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        late.start()
        postgres.start()
        late.join()
    assert postgres.port == port
    with postgres.connect() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
