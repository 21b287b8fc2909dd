"""Files for their owner alone, whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from aijobs.machine import create_private, write_private


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_is_for_its_owner_alone_whatever_stood_there(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new 新")
    assert (path.read_text(encoding="utf-8"), _mode(path), list(tmp_path.iterdir())) == ("new 新", 0o600, [path])


def test_of_two_who_create_a_file_the_first_stands(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert create_private(path, "first") is True
    assert create_private(path, "second") is False
    assert (path.read_text(), _mode(path), list(tmp_path.iterdir())) == ("first", 0o600, [path])


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write_private(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "half a pair: \ud800")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
