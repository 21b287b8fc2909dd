"""Instants, texts and keys are read as written, in any time zone or collation of the server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, func, insert, select, text
from sqlalchemy.exc import IntegrityError, StatementError

from aijobs.db.clock import DatabaseClock, ManualClock, read_clock
from aijobs.db.database import Base, Database, Json, Key, LongText, UtcDateTime
from tests.support.databases import MARIADB, OTHERS_LATER, Databases
from tests.support.jobs import BEGIN, Kit, prepare_database

TABLE = Table(
    "probe",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("at", UtcDateTime),
    Column("name", Key(255), unique=True),
    Column("body", LongText),
    Column("document", Json),
    mysql_charset="utf8mb4",
    mariadb_charset="utf8mb4",
)


@pytest.fixture
def database(create_database: Callable[..., str]) -> Iterator[Database]:
    """A database with the table `probe`."""
    database = Database(create_database())
    TABLE.create(database.engine)
    yield database
    database.dispose()


def _round_trip(database: Database, at: datetime) -> datetime:
    with database.transaction() as session:
        session.execute(TABLE.delete())
        session.execute(insert(TABLE).values(id=1, at=at))
        back: datetime = session.execute(select(TABLE.c.at)).scalar_one()
        return back


INSTANTS = [
    datetime(2026, 3, 1, 8, 0, 0, 0, UTC),
    datetime(2026, 3, 1, 8, 0, 0, 123456, UTC),
    datetime(2026, 3, 1, 8, 0, 0, 999999, UTC),
    datetime(2026, 3, 1, 16, 0, 0, 1000, timezone(timedelta(hours=8))),
    datetime(2026, 10, 25, 2, 30, tzinfo=timezone(timedelta(hours=-11, minutes=-30))),
    datetime(2000, 2, 29, 23, 59, 59, 999000, UTC),
    datetime(2100, 1, 1, tzinfo=UTC),
]


def test_instant_is_read_in_utc_with_the_promised_precision(database: Database, database_server: Databases) -> None:
    for at in INSTANTS:
        back = _round_trip(database, at)
        exact = at.replace(microsecond=at.microsecond // 1000 * 1000) if database_server.kind == "sqlite" else at
        assert back == exact
        assert back.tzinfo is UTC
        assert back - at <= timedelta(0), "aware times subtract"


def test_naive_time_is_refused(database: Database) -> None:
    with pytest.raises(StatementError, match="no time zone"), database.transaction() as session:
        session.execute(insert(TABLE).values(id=1, at=datetime(2026, 1, 1)))


def test_comparisons_in_the_database_agree_with_those_in_python(database: Database) -> None:
    base = datetime(2026, 3, 1, 23, 59, 59, 999000, UTC)
    instants = [base + timedelta(milliseconds=n) for n in (-1000, -1, 0, 1, 2, 60_000, 86_400_000)]
    with database.transaction() as session:
        session.execute(insert(TABLE), [{"id": n, "at": at} for n, at in enumerate(instants, 1)])
        for at in instants:
            below = session.execute(select(func.count()).where(TABLE.c.at < at)).scalar_one()
            assert below == len([one for one in instants if one < at])
            same = session.execute(
                select(TABLE.c.at).where(TABLE.c.at == at.astimezone(timezone(timedelta(hours=8))))
            ).scalar_one()
            assert same == at
        ordered = session.execute(select(TABLE.c.at).order_by(TABLE.c.at)).scalars().all()
        assert ordered == sorted(instants)


def test_database_clock_is_right_in_any_time_zone_of_the_server(database: Database) -> None:
    clock = DatabaseClock()
    with database.read() as session:
        before = datetime.now(UTC) - timedelta(milliseconds=2)
        now = read_clock(session, clock)
        assert before <= now <= datetime.now(UTC) + timedelta(milliseconds=2)
        later, earlier = session.execute(
            select(clock.now(timedelta(seconds=90)), clock.now(timedelta(seconds=-90, milliseconds=-500)))
        ).one()
    assert later - earlier == timedelta(seconds=180, milliseconds=500), "both are computed from the same instant"
    assert abs((later - now).total_seconds() - 90) < 5


@pytest.mark.parametrize(
    "offset",
    [
        timedelta(days=180, milliseconds=1),
        timedelta(days=-180, milliseconds=-1),
        timedelta(days=1, hours=3),
        timedelta(milliseconds=1.499),
        timedelta(),
    ],
    ids=str,
)
def test_database_clock_offset_is_exact_to_the_millisecond(database: Database, offset: timedelta) -> None:
    clock = DatabaseClock()
    with database.read() as session:
        there, here = session.execute(select(clock.now(offset), clock.now())).one()
    assert there - here == timedelta(milliseconds=round(offset.total_seconds() * 1000))


def test_database_clock_advances_within_a_transaction(database: Database) -> None:
    clock = DatabaseClock()
    with database.read() as session:
        first = read_clock(session, clock)
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        assert read_clock(session, clock) > first


def test_row_is_due_by_the_database_clock_to_the_millisecond(database: Database) -> None:
    clock = DatabaseClock()
    with database.transaction() as session:
        session.execute(insert(TABLE).values(id=1, at=clock.now()))
        session.execute(insert(TABLE).values(id=2, at=clock.now(timedelta(seconds=30))))
        due = session.execute(select(TABLE.c.id).where(TABLE.c.at <= clock.now())).scalars().all()
        soon = session.execute(select(TABLE.c.id).where(TABLE.c.at <= clock.now(timedelta(seconds=31)))).scalars().all()
    assert (due, soon) == ([1], [1, 2])


def test_manual_clock_stands_until_it_is_advanced(database: Database) -> None:
    clock = ManualClock(BEGIN)
    with database.read() as session:
        assert read_clock(session, clock) == BEGIN
        clock.advance(timedelta(milliseconds=1))
        assert read_clock(session, clock) == BEGIN + timedelta(milliseconds=1)


@OTHERS_LATER
def test_processes_in_other_time_zones_agree_on_a_lease(live_kit: Kit) -> None:
    """One process and its server are in Shanghai, the other process is in New York."""
    claim = live_kit.running()
    code = (
        "import sys\n"
        "from aijobs.db.database import Database\n"
        "from sqlalchemy import select\n"
        "from aijobs.db.clock import DatabaseClock\n"
        "from aijobs.jobs.models import AiJob\n"
        "database = Database(sys.argv[1])\n"
        "with database.read() as s:\n"
        "    at, now = s.execute(select(AiJob.lock_until, DatabaseClock().now())).one()\n"
        "print(at.isoformat(), (at - now).total_seconds())\n"
        "database.dispose()\n"
    )
    for zone in ("Asia/Shanghai", "America/New_York", "UTC"):
        done = subprocess.run(
            [sys.executable, "-c", code, live_kit.url],
            env={"TZ": zone, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        until, left = done.stdout.split()
        assert datetime.fromisoformat(until) == live_kit.job(claim.job_id).lock_until
        assert 0 < float(left) <= 60
    assert live_kit.lifecycle.find_expired_locks() == []


# --- texts ---------------------------------------------------------------------------------------------------------

DIFFERENT = [
    *("a", "A", "á", "a\u0301", "ａ", "a ", " a", "a\t", "a\u00a0", "a\u200b", "b", "ß", "ss", "SS", "ẞ"),
    *("i", "I", "ı", "İ", "ﬁ", "fi", "\U0001f600", "\U0001f601", "\U0010ffff", "漢", "汉", "0", "00", "٠"),
]


def test_keys_are_compared_and_ordered_by_their_bytes(database: Database) -> None:
    with database.transaction() as session:
        session.execute(insert(TABLE), [{"id": n, "name": name} for n, name in enumerate(DIFFERENT, 1)])
        for n, name in enumerate(DIFFERENT, 1):
            assert session.execute(select(TABLE.c.id).where(TABLE.c.name == name)).scalars().all() == [n]
        ordered = session.execute(select(TABLE.c.name).order_by(TABLE.c.name)).scalars().all()
    assert ordered == sorted(DIFFERENT, key=str.encode)
    with pytest.raises(IntegrityError), database.transaction() as session:
        session.execute(insert(TABLE).values(id=99, name="a"))


def test_long_texts_and_documents_with_any_unicode_are_read_unchanged(database: Database) -> None:
    body = "👩🏽‍💻\U0010ffff\u202e\x01\r\n\u2028é e\u0301 " * 20_000
    document = {"k\U0010ffff": [body, 1.5, -0.0, 2**53 - 1, None, True, {"": []}], "b": 1, "a": 2}
    with database.transaction() as session:
        session.execute(insert(TABLE).values(id=1, body=body, document=document))
        row = session.execute(select(TABLE.c.body, TABLE.c.document)).one()
    assert row.body == body
    assert row.document == document
    assert list(row.document) == list(document), "the order of keys is kept"


def test_document_that_is_not_json_is_refused_before_the_statement(database: Database) -> None:
    with pytest.raises((StatementError, ValueError)), database.transaction() as session:
        session.execute(insert(TABLE).values(id=1, document={"a": float("nan")}))


def test_missing_document_is_sql_null_and_not_json_null(database: Database) -> None:
    with database.transaction() as session:
        session.execute(insert(TABLE).values(id=1, document=None))
        assert session.execute(select(TABLE.c.id).where(TABLE.c.document.is_(None))).scalars().all() == [1]


@MARIADB  # The other databases have one character set.
def test_every_text_column_of_mariadb_accepts_any_character(create_database: Callable[..., str]) -> None:
    database = Database(create_database(prepare_database))
    try:
        with database.read() as session:
            columns = session.execute(
                text(
                    "SELECT table_name, column_name, character_set_name, collation_name"
                    " FROM information_schema.columns"
                    " WHERE table_schema = database() AND character_set_name IS NOT NULL"
                )
            ).all()
            sets = session.execute(text("SELECT @@character_set_client, @@character_set_connection")).one()
    finally:
        database.dispose()
    ours = [column for column in columns if column[0] in Base.metadata.tables]
    assert len(ours) > 50
    assert {column[2] for column in ours} == {"utf8mb4"}
    assert not [column for column in ours if column[3] not in ("utf8mb4_nopad_bin", "utf8mb4_bin")]
    assert set(sets) == {"utf8mb4"}
