"""Removes what nobody needs any more, in small batches."""

from __future__ import annotations

from collections.abc import Callable

from aijobs.db.clock import Clock
from aijobs.db.database import Database
from aijobs.db.steps import Steps
from aijobs.jobs.snapshots import delete_expired
from aijobs.logs import get_logger

logger = get_logger(__name__)


class SnapshotCleanup:
    """Deletes expired snapshots of final jobs; one of a job that isn't final stays, however old."""

    def __init__(
        self, database: Database, clock: Clock, batch: int = 20, progress: Callable[[], None] = lambda: None
    ) -> None:
        """`progress` is called after each batch."""
        self._clock, self._batch, self._steps = clock, batch, Steps(database, progress=progress)

    def run(self) -> int:
        """Delete all that are expired; how many."""
        deleted = 0
        while count := self._steps.write(lambda s: delete_expired(s, self._clock, self._batch)):
            deleted += count
        if deleted:
            logger.info("snapshots.deleted", count=deleted)
        return deleted
