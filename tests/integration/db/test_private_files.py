"""Only its owner can read an SQLite database."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from sqlalchemy import text

from aijobs.db.database import Database


def test_sqlite_files_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        database = Database(f"sqlite:///{tmp_path / 'aijobs.db'}")
        with database.transaction() as session:
            session.execute(text("CREATE TABLE t (x)"))
            found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        database.dispose()
    finally:
        os.umask(before)
    assert found == dict.fromkeys(("aijobs.db", "aijobs.db-shm", "aijobs.db-wal"), 0o600)


def test_new_connection_releases_no_lock_of_its_process(tmp_path: Path) -> None:
    """Closing any descriptor of the file releases all locks of the process. Another process would then believe that it
    is the last one, and remove the write-ahead log.
    """
    path = tmp_path / "aijobs.db"
    first, second = Database(f"sqlite:///{path}"), Database(f"sqlite:///{path}")
    with first.transaction() as session:
        session.execute(text("CREATE TABLE t (x)"))
    with first.read() as session, second.read() as other:
        for reader in (session, other):
            reader.execute(text("SELECT * FROM t"))
        come_and_go = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM t'); c.close()"
        subprocess.run([sys.executable, "-c", come_and_go, str(path)], check=True)
        assert path.with_name("aijobs.db-wal").exists()
    second.dispose()
    first.dispose()
