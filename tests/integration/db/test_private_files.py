"""An SQLite database is its owner's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sqlalchemy import text

from aijobs.db import Database


def test_nobody_else_may_read_the_notes_in_an_sqlite_database(tmp_path: Path) -> None:
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
