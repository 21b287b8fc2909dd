"""Addresses of databases and brokers in the forms of hosting platforms: accepted, or refused with advice."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from aijobs.addresses import broker_address, database_address, host_and_query
from aijobs.db.engines import build_engine
from aijobs.errors import SettingsError
from aijobs.queues.connection import connect
from aijobs.settings import Settings

SECRET = "hunter2"
WITH = f"u:{SECRET}@127.0.0.1"


def load(folder: Path, **given: str) -> Settings:
    return Settings.load({"AIJOBS_INSTANCE_PATH": str(folder), **{f"AIJOBS_{n}": value for n, value in given.items()}})


UNDERSTOOD = {
    f"postgres://{WITH}:5432/db": f"postgresql+psycopg://{WITH}:5432/db",
    f"postgresql://{WITH}/db?sslmode=require": f"postgresql+psycopg://{WITH}/db?sslmode=require",
    f"POSTGRES://{WITH}/db": f"postgresql+psycopg://{WITH}/db",
    f"postgresql+psycopg://{WITH}/db": f"postgresql+psycopg://{WITH}/db",
    f"mysql://{WITH}:3306/db?charset=utf8mb4": f"mysql+pymysql://{WITH}:3306/db?charset=utf8mb4",
    f"mariadb://{WITH}/db": f"mariadb+pymysql://{WITH}/db",
    f"mysql+pymysql://{WITH}/db?ssl_ca=/etc/ca.pem": f"mysql+pymysql://{WITH}/db?ssl_ca=/etc/ca.pem",
    f'"postgres://{WITH}/db"': f"postgresql+psycopg://{WITH}/db",
    f"'mysql://{WITH}/db'": f"mysql+pymysql://{WITH}/db",
    f" postgres://{WITH}/db\r\n": f"postgresql+psycopg://{WITH}/db",
    "postgres://u:a/b#c?d@127.0.0.1/db": "postgresql+psycopg://u:a/b#c?d@127.0.0.1/db",
    "postgres://u@[::1]:5432/db": "postgresql+psycopg://u@[::1]:5432/db",
    "postgres:///db?host=/run/postgresql": "postgresql+psycopg:///db?host=/run/postgresql",
    "sqlite:////tmp/x.db": "sqlite:////tmp/x.db",
    "sqlite:///x.db": "sqlite:///x.db",
    "sqlite3:///x.db": "sqlite:///x.db",
    '"sqlite:///x y.db"\n': "sqlite:///x y.db",
}


@pytest.mark.parametrize("given", UNDERSTOOD)
def test_database_address_of_a_hosting_platform_is_accepted(tmp_path: Path, given: str) -> None:
    settings = load(tmp_path, DATABASE_URL=given)
    assert settings.database_url == UNDERSTOOD[given]
    build_engine(settings.database_url).dispose()


REFUSED = {
    "sqlite://x.db": "write sqlite:///FILE",
    "sqlite://tmp/x.db": "write sqlite:///FILE",
    "sqlite://": "names no file",
    "sqlite:///": "names no file",
    "sqlite:///:memory:": "names no file",
    "sqlite:x.db": "is not an address",
    "/var/lib/x.db": "is not an address",
    "jdbc:postgresql://127.0.0.1/db": "is not an address",
    f"oracle://{WITH}/db": "another kind of database",
    f"postgresql+psycopg2://{WITH}/db": "write postgresql+psycopg://",
    f"postgresql+asyncpg://{WITH}/db": "write postgresql+psycopg://",
    f"mysql+mysqldb://{WITH}/db": "write mysql+pymysql://",
    f"postgres://{WITH}:port/db": "the port is no number",
    f"postgres://{WITH}:0/db": "the port is no number",
    f"postgres://{WITH}:99999/db": "the port is no number",
    f"mysql://{WITH}:33 06/db": "the port is no number",
    f"postgres://u:a@{SECRET}@127.0.0.1/db": "written %40",
    f"postgres://u:a@{SECRET}:x@127.0.0.1/db": "@ is %40",
    f"mysql://{WITH}": "names no database",
    f"mysql://{WITH}/": "names no database",
    f"postgres://u:{SECRET}@[::1/db": "the port is no number",
    f"postgres://u:{SECRET}\n@127.0.0.1/db": "can't be seen",
}


@pytest.mark.parametrize("given", REFUSED)
def test_invalid_database_address_is_refused_with_advice(tmp_path: Path, given: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, ENV="development", DATABASE_URL=given)
    line = str(refused.value)
    assert "AIJOBS_DATABASE_URL" in line
    assert REFUSED[given] in line
    assert "\n" not in line
    assert SECRET not in line


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (f"postgres://{WITH}/db?schema=public", "schema"),
        (f"postgres://{WITH}/db?pgbouncer=true&sslmode=require", "pgbouncer"),
        (f"mysql://{WITH}/db?ssl-mode=REQUIRED", "ssl-mode"),
        (f"mysql://{WITH}/db?sslmode=require", "sslmode"),
        ("sqlite:////tmp/x.db?foo=1&timeout=3", "foo"),
        ("sqlite:////tmp/x.db?mode=ro", "mode"),
        ("sqlite:////tmp/x.db?uri=true&mode=ro&foo=1", "foo"),
    ],
)
def test_unknown_driver_option_is_named(given: str, named: str) -> None:
    with pytest.raises(SettingsError, match=rf"AIJOBS_DATABASE_URL: {named} is no option") as refused:
        build_engine(database_address(given))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("given", ["x", f"mysql+pymysql://{WITH}/db?connect_timeout={SECRET}", f"foo://{WITH}"])
def test_unreadable_database_address_is_refused_without_its_password(given: str) -> None:
    with pytest.raises(SettingsError, match="AIJOBS_DATABASE_URL can't be read") as refused:
        build_engine(given)
    assert SECRET not in str(refused.value)


_PART = st.text(st.characters(codec="ascii", exclude_characters="@", exclude_categories=["Cc"]), max_size=12)


@given(_PART, st.sampled_from(["127.0.0.1", "db.example.org", "[::1]"]), _PART)
def test_checked_host_is_the_host_that_is_connected_to(password: str, host: str, name: str) -> None:
    try:
        address = database_address(f"postgres://u:{password}@{host}:5432/{name}")
    except SettingsError:
        return
    assert host_and_query("AIJOBS_DATABASE_URL", address)[0] == (make_url(address).host or "")


BROKERS = {
    "redis://:p@127.0.0.1:6379/1": "redis://:p@127.0.0.1:6379/1",
    '"redis://127.0.0.1"\n': "redis://127.0.0.1",
    "valkey://127.0.0.1:6379": "redis://127.0.0.1:6379",
    "valkeys://127.0.0.1": "rediss://127.0.0.1",
    "unix:///run/redis.sock?db=1": "unix:///run/redis.sock?db=1",
    "redis://127.0.0.1/": "redis://127.0.0.1/",
    "redis://127.0.0.1/15?socket_keepalive=yes": "redis://127.0.0.1/15?socket_keepalive=yes",
}


@pytest.mark.parametrize("given", BROKERS)
def test_broker_address_is_accepted(tmp_path: Path, given: str) -> None:
    settings = load(tmp_path, REDIS_URL=given)
    assert settings.redis_url == BROKERS[given]
    connect(settings.redis_url).close()


@pytest.mark.parametrize(
    "given",
    [
        f"redis://:{SECRET}@h:port/0",
        f"redis://:{SECRET}@h:99999",
        f"redis://:a/{SECRET}@h",
        f"http://{SECRET}.h",
        SECRET,
    ],
)
def test_invalid_broker_address_is_refused_without_its_password(given: str) -> None:
    with pytest.raises(SettingsError, match="AIJOBS_REDIS_URL") as refused:
        broker_address(given)
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        "redis://h/abc",
        "redis://h/7x",
        "rediss://h/-1",
        "redis://h/0/1",
        "redis://h/١",
        "unix:///s?db=-1",
        "redis://h?db=x",
    ],
)
def test_broker_address_with_an_invalid_database_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match="AIJOBS_REDIS_URL: the database is a number from 0"):
        broker_address(given)


@pytest.mark.parametrize("given", ["redis+cluster://h", "redis-sentinel://h/0", "REDISS+SENTINEL://h"])
def test_cluster_and_sentinel_are_refused_as_such(given: str) -> None:
    with pytest.raises(SettingsError, match="Redis Cluster and Sentinel aren't supported"):
        broker_address(given)


def test_sqlite_options_are_accepted(tmp_path: Path) -> None:
    build_engine(f"sqlite:///{tmp_path}/x.db?cached_statements=50").dispose()
    build_engine(f"sqlite:///file:{tmp_path}/x.db?uri=true&mode=rwc").dispose()
