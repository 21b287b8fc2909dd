"""`aijobs demo` with real processes: cards in both languages, with quotes from their notes."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from aijobs.cli.terminal import cells
from tests.support.processes import Run, clean_environment

AIJOBS = str(Path(sys.executable).with_name("aijobs"))


def test_demo_prints_english_and_chinese_cards_and_ends_all_processes(run: Run) -> None:
    instance = run.new_folder("demo")
    done = subprocess.run(
        [AIJOBS, "demo"],
        env=clean_environment({"AIJOBS_INSTANCE_PATH": str(instance)}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    said = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert "Photosynthesis" in said
    assert "光合作用" in said
    quotes = [line for line in said.splitlines() if line.strip().startswith("> “")]
    assert any("光" in quote for quote in quotes)
    assert any("light" in quote for quote in quotes)
    assert len(quotes) >= 10
    assert max(cells(line) for line in said.splitlines() if line.startswith("     ")) <= 80
    assert "make run" in said
    assert "/console/jobs/" in said
    assert "\x1b" not in said  # No colours without a terminal.
    assert not (instance / "broker.json").exists()
    assert sorted(path.name for path in instance.glob("aijobs.db*")) == ["aijobs.db"]
    copied = run.new_folder("copied") / "copied.db"
    shutil.copyfile(instance / "aijobs.db", copied)
    with closing(sqlite3.connect(copied)) as connection:
        states = connection.execute("SELECT lifecycle_status FROM ai_jobs").fetchall()
    assert states == [("succeeded",), ("succeeded",)]
