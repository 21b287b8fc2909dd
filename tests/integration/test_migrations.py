"""The migrations on SQLite, PostgreSQL and MariaDB build the schema of the models."""

from __future__ import annotations

import importlib.util
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Engine, MetaData, Table, inspect, select, text

import aijobs
from aijobs.db.database import Base, Database, Key, UtcDateTime
from aijobs.db.engines import build_engine
from aijobs.db.schema import HEAD, REVISIONS, check_schema, read_revision, upgrade
from aijobs.errors import SettingsError
from aijobs.jobs.models import AiJob
from aijobs.settings import resource
from tests.support.databases import Databases
from tests.support.processes import Processes, clean_environment
from tests.support.rows import add, build_job

MIGRATIONS = resource("migrations")

# Import every models module, so that a table without a migration is found here.
for _module in pkgutil.walk_packages(aijobs.__path__, "aijobs."):
    if _module.name.endswith(".models"):
        importlib.import_module(_module.name)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    made = build_engine(database_url)
    yield made
    made.dispose()


def _run(engine: Engine, step: Callable[..., Any], *arguments: str) -> None:
    config = Config(MIGRATIONS / "alembic.ini")
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        step(config, *arguments)


def _describe(engine: Engine) -> dict[str, Any]:
    """Return the server's description of each table, in an order that doesn't depend on how it was created."""
    inspector = inspect(engine)

    def by_name(items: list[Any]) -> list[Any]:
        return sorted(({k: str(v) for k, v in item.items()} for item in items), key=lambda item: item["name"])

    return {
        name: {
            "columns": by_name(inspector.get_columns(name)),
            "primary key": inspector.get_pk_constraint(name),
            "foreign keys": by_name(inspector.get_foreign_keys(name)),
            "indexes": by_name(inspector.get_indexes(name)),
            "unique": by_name(inspector.get_unique_constraints(name)),
            "checks": by_name(inspector.get_check_constraints(name)),
        }
        for name in inspector.get_table_names()
        if name != "alembic_version"
    }


def test_revisions_list_every_migration_in_order() -> None:
    scripts = ScriptDirectory.from_config(Config(MIGRATIONS / "alembic.ini"))
    assert tuple(script.revision for script in reversed(list(scripts.walk_revisions()))) == REVISIONS
    assert scripts.get_current_head() == HEAD


def test_migrated_schema_equals_the_models(engine: Engine) -> None:
    upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_migrated_and_created_schemas_are_the_same_on_the_server(
    create_database: Callable[..., str],
) -> None:
    migrated, created = build_engine(create_database()), build_engine(create_database())
    upgrade(migrated)
    Base.metadata.create_all(created)
    assert _describe(migrated) == _describe(created)
    assert set(_describe(migrated)) == set(Base.metadata.tables)
    migrated.dispose()
    created.dispose()


def test_downgrade_and_upgrade_restore_the_same_schema(engine: Engine) -> None:
    upgrade(engine)
    first = _describe(engine)
    _run(engine, command.downgrade, "base")
    assert inspect(engine).get_table_names() == ["alembic_version"]
    upgrade(engine)
    assert _describe(engine) == first


def test_jobs_from_before_the_second_migration_have_no_uncharged_loss(engine: Engine) -> None:
    upgrade(engine)
    database = Database(engine)
    add(database, job := build_job(lost_count=1, uncharged_losses=3))
    _run(engine, command.downgrade, "0001")
    assert upgrade(engine) == "0001"
    with database.read() as session:
        assert session.execute(select(AiJob.id, AiJob.lost_count, AiJob.uncharged_losses)).one() == (job.id, 1, 0)


def test_second_upgrade_changes_nothing(engine: Engine) -> None:
    assert upgrade(engine) is None
    assert upgrade(engine) == HEAD
    assert read_revision(engine) == HEAD


def test_upgrade_from_each_revision_keeps_the_operators(engine: Engine) -> None:
    """Rows of an older version are kept, also if the newest migration is undone and repeated."""
    _run(engine, command.upgrade, REVISIONS[0])
    row = {"id": "o1", "username": "ann", "password_hash": "x", "role": "VIEWER", "active": True, "session_version": 3}
    columns = ", ".join(row)
    values = ", ".join(f":{name}" for name in row)
    with engine.begin() as connection:
        insert = f"INSERT INTO operators ({columns}, created_at) VALUES ({values}, '2026-01-01 00:00:00.000')"
        connection.execute(text(insert), row)
    for revision in (*REVISIONS[1:], REVISIONS[0], HEAD):
        step = command.downgrade if revision == REVISIONS[0] else command.upgrade
        _run(engine, step, revision)
        with engine.connect() as connection:
            found = connection.execute(text("SELECT username, session_version FROM operators")).all()
        assert [tuple(row) for row in found] == [("ann", 3)], revision


def test_concurrent_upgrades_succeed(database_url: str, processes: Processes) -> None:
    code = (
        "import sys; from aijobs.db.engines import build_engine; from aijobs.db.schema import upgrade;"
        "upgrade(build_engine(sys.argv[1])); print('up')"
    )
    programs = [processes.spawn([sys.executable, "-c", code, database_url], name=f"upgrade-{i}") for i in range(3)]
    assert [program.wait(timeout=60) for program in programs] == [0, 0, 0]
    engine = build_engine(database_url)
    assert read_revision(engine) == HEAD
    assert set(_describe(engine)) == set(Base.metadata.tables)
    engine.dispose()


@pytest.mark.long
def test_flask_migrate_uses_the_same_migrations_and_finds_no_difference(sqlite_url: str, tmp_path: Path) -> None:
    env = clean_environment(
        {
            "AIJOBS_DATABASE_URL": sqlite_url,
            "AIJOBS_REDIS_URL": "redis://127.0.0.1:1/0",
            "AIJOBS_INSTANCE_PATH": str(tmp_path),
        }
    )
    for step, said in (("upgrade", ""), ("current", f"{HEAD} (head)"), ("check", "No new upgrade operations")):
        done = subprocess.run(
            [sys.executable, "-m", "flask", "--app", "aijobs.web.factory:create_app", "db", step],
            env=env,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout + done.stderr
    engine = build_engine(sqlite_url)
    assert read_revision(engine) == HEAD
    engine.dispose()


# --- schemas that are refused -------------------------------------------------------------------------------


def test_database_without_a_schema_is_refused_with_the_command_to_create_it(engine: Engine) -> None:
    with pytest.raises(SettingsError, match="no schema yet: run `aijobs db upgrade`"):
        check_schema(engine)


def test_schema_at_head_is_accepted(engine: Engine) -> None:
    upgrade(engine)
    check_schema(engine)


def test_older_schema_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(engine)
    monkeypatch.setattr("aijobs.db.schema.REVISIONS", (*REVISIONS, "9998"))
    monkeypatch.setattr("aijobs.db.schema.HEAD", "9998")
    with pytest.raises(SettingsError, match=rf"older \({HEAD}\) than this code \(9998\)") as refused:
        check_schema(engine)
    assert "\n" not in str(refused.value)


def test_newer_schema_is_refused_by_start_and_upgrade(engine: Engine) -> None:
    upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for refused in (check_schema, upgrade):
        with pytest.raises(SettingsError, match=r"\(9999\) is newer than this code"):
            refused(engine)


def test_check_of_a_missing_sqlite_file_does_not_create_it(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "aijobs.db"
    engine = build_engine(f"sqlite:///{path}")
    with pytest.raises(SettingsError, match="no schema yet"):
        check_schema(engine)
    assert not path.parent.exists()
    upgrade(engine)
    check_schema(engine)
    engine.dispose()


# --- text on the servers ------------------------------------------------------------------------------------


def test_every_mariadb_table_and_column_is_utf8mb4_and_compares_byte_by_byte(
    database_server: Databases, engine: Engine
) -> None:
    if database_server.kind != "mariadb":
        upgrade(engine)
        assert read_revision(engine) == HEAD
        return
    with engine.begin() as connection:
        # The database has another default character set, which the tables must not inherit.
        connection.execute(text(f"ALTER DATABASE {engine.url.database} CHARACTER SET latin1 COLLATE latin1_swedish_ci"))
    upgrade(engine)
    with engine.connect() as connection:
        columns = connection.execute(
            text(
                "SELECT table_name, column_name, character_set_name, collation_name"
                " FROM information_schema.columns WHERE table_schema = DATABASE()"
                " AND character_set_name IS NOT NULL"
            )
        ).all()
        tables = connection.execute(
            text(
                "SELECT table_name, engine, table_collation FROM information_schema.tables"
                " WHERE table_schema = DATABASE()"
            )
        ).all()
    assert columns
    json_columns = {
        (table.name, column.name)
        for table in Base.metadata.tables.values()
        for column in table.columns
        if column.type.__visit_name__ == "JSON"
    }
    # MariaDB's JSON is LONGTEXT in utf8mb4_bin by definition; documents aren't compared.
    wrong = [
        row
        for row in columns
        if row[2] != "utf8mb4" or (row[3] != "utf8mb4_nopad_bin" and (row[0], row[1]) not in json_columns)
    ]
    assert wrong == []
    assert {(row[1], row[2]) for row in tables} == {("InnoDB", "utf8mb4_nopad_bin")}


@pytest.mark.parametrize(
    "written",
    ["👩🏽‍🔬 \U0010ffff e\u0301 ≠ é \u202eright to left\u202c 抽认卡，全角 ＡＢ k ", "trailing\t"],
)
def test_text_of_any_script_is_read_unchanged(engine: Engine, written: str) -> None:
    upgrade(engine)
    table = Base.metadata.tables["queue_pauses"]
    values = {
        "queue_name": "ai-interactive",
        "reason": written,
        "paused_by": written,
        "paused_at": text("'2026-01-01 00:00:00'"),
    }
    with engine.begin() as connection:
        connection.execute(table.insert().values(**values))
        row = connection.execute(table.select().with_only_columns(table.c.reason, table.c.paused_by)).one()
    assert tuple(row) == (written, written)


# --- future migrations --------------------------------------------------------------------------------------


def test_generated_migration_runs_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    # The models have one more table with each of our column types, for which no migration exists.
    code = (
        "import sys; from alembic import command; from alembic.config import Config\n"
        "from sqlalchemy import Column, Table\n"
        "from aijobs.db.database import Base, Json, Key, LongText, UtcDateTime\n"
        "from aijobs.db.engines import build_engine\n"
        "Table('extras', Base.metadata, Column('id', Key(36), primary_key=True),\n"
        "      Column('at', UtcDateTime()), Column('doc', Json), Column('body', LongText))\n"
        "config = Config(sys.argv[1] + '/alembic.ini')\n"
        "engine = build_engine('sqlite:///' + sys.argv[2])\n"
        "for step in (lambda: command.upgrade(config, 'head'),\n"
        "             lambda: command.revision(config, 'extras', autogenerate=True, rev_id='9998'),\n"
        "             lambda: command.upgrade(config, 'head'), lambda: command.downgrade(config, '-1')):\n"
        "    with engine.connect() as connection:\n"
        "        config.attributes['connection'] = connection\n"
        "        step()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tmp_path / "x.db")],
        env=clean_environment({"AIJOBS_INSTANCE_PATH": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    generated = (folder / "versions" / "9998_extras.py").read_text()
    for rendered in ("Key(36)", "UtcDateTime()", "Json", "LongText"):
        assert f", {rendered}," in generated
        assert f"from aijobs.db.database import {rendered.partition('(')[0]}\n" in generated


def test_changed_column_type_is_detected(sqlite_url: str) -> None:
    """Otherwise the comparison with the models would prove nothing."""
    engine = build_engine(sqlite_url)
    drifted = MetaData()
    Table("t", drifted, Column("id", Key(36), primary_key=True), Column("at", UtcDateTime()))
    drifted.create_all(engine)
    other = MetaData()
    Table("t", other, Column("id", Key(40), primary_key=True), Column("at", UtcDateTime()), Column("x", Key(3)))
    with engine.connect() as connection:
        found = compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), other)
    assert len(found) == 2
    engine.dispose()
