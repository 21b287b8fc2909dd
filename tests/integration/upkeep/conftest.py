"""Services over each database, with a clock that stands still, or the database's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from aijobs.db import ManualClock
from tests.support.jobs import BEGIN, Kit, open_kit, prepare_database


@pytest.fixture
def kit(create_database: Callable[..., str]) -> Iterator[Kit]:
    """Services over each database in turn; the clock stands still until it is moved."""
    with open_kit(create_database(prepare_database), clock=ManualClock(BEGIN)) as kit:
        yield kit


@pytest.fixture
def live_kit(create_database: Callable[..., str]) -> Iterator[Kit]:
    """As `kit`, judged by the database's own clock."""
    with open_kit(create_database(prepare_database)) as kit:
        yield kit


@pytest.fixture
def sqlite_kit(create_sqlite_database: Callable[..., str]) -> Iterator[Kit]:
    """As `kit`, for what has nothing to do with the kind of database."""
    with open_kit(create_sqlite_database(prepare_database), clock=ManualClock(BEGIN)) as kit:
        yield kit
