"""Private files: readable only by their owner, and written completely or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from aijobs.machine import create_private, write_private


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_written_file_is_private_even_if_the_old_one_was_not(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new 新")
    assert (path.read_text(encoding="utf-8"), _mode(path), list(tmp_path.iterdir())) == ("new 新", 0o600, [path])


def test_second_create_of_a_file_keeps_the_first(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert create_private(path, "first") is True
    assert create_private(path, "second") is False
    assert (path.read_text(), _mode(path), list(tmp_path.iterdir())) == ("first", 0o600, [path])


def test_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write_private(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "half a pair: \ud800")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
