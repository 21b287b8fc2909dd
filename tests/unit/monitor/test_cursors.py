"""Cursors: a forged cursor never reaches the database."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aijobs.errors import InputInvalid
from aijobs.monitor.keyset import Cursors

CURSORS = Cursors("s" * 32)
AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
CURSOR = CURSORS.write("jobs", (AT, "id-1"))


def test_cursor_is_read_as_written() -> None:
    assert CURSORS.read("jobs", CURSOR) == (AT, "id-1")


@pytest.mark.parametrize("position", range(0, len(CURSOR), 3))
def test_changed_cursor_is_refused(position: int) -> None:
    changed = CURSOR[:position] + ("A" if CURSOR[position] != "A" else "B") + CURSOR[position + 1 :]
    raw = base64.urlsafe_b64decode(changed + "=" * (-len(changed) % 4))
    if raw == base64.urlsafe_b64decode(CURSOR + "=" * (-len(CURSOR) % 4)):
        pytest.skip("the bits that were changed are padding")
    with pytest.raises(InputInvalid):
        CURSORS.read("jobs", changed)


def test_cursor_of_another_list_or_installation_is_refused() -> None:
    for cursors, scope in ((CURSORS, "own:u1"), (Cursors("t" * 32), "jobs")):
        with pytest.raises(InputInvalid):
            cursors.read(scope, CURSOR)


@given(st.text())
def test_arbitrary_text_is_no_cursor(text: str) -> None:
    with pytest.raises(InputInvalid):
        CURSORS.read("jobs", text)
