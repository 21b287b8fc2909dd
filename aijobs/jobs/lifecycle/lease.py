"""What a lease's holder writes while its attempt runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import or_
from sqlalchemy.orm import Session

from aijobs.canonical import canonical_hash
from aijobs.db.database import TRIES
from aijobs.db.statements import read_rows
from aijobs.jobs.conditions import NO_CANCEL
from aijobs.jobs.errors import JobLockConflict
from aijobs.jobs.history import HistoryType
from aijobs.jobs.lease import Lease, LockedRow
from aijobs.jobs.lifecycle.changes import JobChanges, Note
from aijobs.jobs.lifecycle.confirm import saved
from aijobs.jobs.lifecycle.statements import ASKED, LOCK_ROW, LOCK_UNTIL, LOCK_UNTIL_NOW, SAVED, of, raised_to
from aijobs.jobs.models import AiJob


class Leases(JobChanges):
    """Renewal, progress, calls and output of an attempt. `LockLost` if another attempt holds the job."""

    def extend_lock(self, lease: Lease, *, tries: int = TRIES, waits: bool = True) -> None:
        """Renew the lease. One that has run out is renewed too, if no other attempt has the job.

        Unless it `waits`, a row that another transaction has locked is refused (`JobLockConflict`): while a child
        process projects the job, nobody can take the lease.
        """
        values = {"lock_until": self._clock.now(self._policy.length)}
        self._database.write(lambda session: self._set_held(session, lease, values, waits), tries=tries)

    def report_progress(self, lease: Lease, percent: int, *, tries: int = TRIES) -> None:
        """Raise the progress to `percent` (0–100). Within an attempt it never falls."""
        values = {"progress": raised_to(max(0, min(100, percent)))}
        self._database.write(lambda session: self._set_held(session, lease, values), tries=tries)

    def save_output(self, lease: Lease, output: Any, session: Session | None = None) -> AiJob:
        """Save the validated output and its hash on the job, so that it is never bought again."""
        note, output_hash = Note(HistoryType.OUTPUT_SAVED), canonical_hash(output)
        values = {"validated_output": output, "output_hash": output_hash, "progress": raised_to(SAVED)}
        # A repeat after a COMMIT whose answer was late must add no second history row.
        new = or_(AiJob.output_hash.is_(None), AiJob.output_hash != output_hash)
        return self._in(session, lambda s: self._change_held(s, lease, note, new, **values), saved(lease, output_hash))

    def note_provider_call(self, session: Session, lease: Lease) -> AiJob:
        """Record that the attempt is about to call a provider, in the transaction that opens the usage row.

        `CancelRequested` if a cancel was requested: then no call is made.
        """
        return self._change_held(
            session, lease, Note(HistoryType.PROVIDER_CALLED), NO_CANCEL, progress=raised_to(ASKED)
        )

    def lock_row(self, session: Session, lease: Lease) -> LockedRow:
        """Lock the held job's row until the end of the transaction, for a projection, and read what that needs.

        `CancelRequested` if a cancel was requested, `LockLost` if the lease is lost.
        """
        row = read_rows(session, LOCK_ROW, of(lease)).one_or_none()
        if row is None:
            raise self._refusal(session, lease)
        return LockedRow(**row._asdict())

    def _set_held(self, session: Session, lease: Lease, values: dict[str, Any], waits: bool = True) -> None:
        """Write columns of a held job that are no change of state and leave no history."""
        if not waits:
            self._lock_until(session, lease, waits)
        if not self._set(session, lease, **values):
            raise self._refusal(session, lease)

    @staticmethod
    def _lock_until(session: Session, lease: Lease, waits: bool) -> datetime | None:
        """Lock the job's row and return its `lock_until`. Unless it `waits`, `JobLockConflict` if another transaction
        has the row.
        """
        row = read_rows(session, LOCK_UNTIL if waits else LOCK_UNTIL_NOW, of(lease.job_id)).one_or_none()
        if row is None:
            raise JobLockConflict(lease.job_id, "another transaction has its row")
        lock_until: datetime | None = row.lock_until
        return lock_until
