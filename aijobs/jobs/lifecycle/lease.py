"""What a lease's holder writes while its attempt runs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, or_, update
from sqlalchemy.orm import Session

from aijobs.canonical import canonical_hash
from aijobs.db.database import TRIES, Unit
from aijobs.db.statements import read_rows
from aijobs.jobs.conditions import NO_CANCEL
from aijobs.jobs.errors import JobLockConflict
from aijobs.jobs.history import HistoryType, history_row, note_parameters
from aijobs.jobs.lease import Lease
from aijobs.jobs.lifecycle.changes import JobChanges
from aijobs.jobs.lifecycle.confirm import saved
from aijobs.jobs.lifecycle.statements import (
    ASKED,
    HELD,
    LOCK_ROW,
    LOCK_UNTIL,
    LOCK_UNTIL_NOW,
    SAVED,
    TO_HASH,
    TO_OUTPUT,
    of,
    raised_to,
)
from aijobs.jobs.lifecycle.transition import JOBS, Inserts, Transition
from aijobs.jobs.models import AiJob, AiJobEvent


class SavedOutput(NamedTuple):
    """The output that is saved on a job; None, with no hash, if none is."""

    output_hash: str | None
    output: Any


class Leases(JobChanges):
    """Renewal, progress, calls and output of an attempt. `LockLost` if another attempt holds the job."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._call = self._held_transition(HELD, NO_CANCEL, progress=raised_to(ASKED))
        # A repeat after a COMMIT whose answer was late must add no second history row.
        new = or_(AiJob.output_hash.is_(None), AiJob.output_hash != TO_HASH)
        self._save = self._held_transition(
            HELD, new, progress=raised_to(SAVED), validated_output=TO_OUTPUT, output_hash=TO_HASH
        )

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

    def save_output(self, lease: Lease, output: Any, unit: Unit | None = None) -> str:
        """Save the validated output on the job, so that it is never bought again, and return its hash."""
        output_hash = canonical_hash(output)
        parameters = {"to_output": output, "to_output_hash": output_hash, **note_parameters(HistoryType.OUTPUT_SAVED)}

        def save(unit: Unit) -> str:
            self._run_held(unit, self._save, lease, parameters)
            return output_hash

        return save(unit) if unit is not None else self._database.transact(save, saved(lease, output_hash))

    def note_provider_call(self, unit: Unit, lease: Lease) -> None:
        """Record that the attempt is about to call a provider, in the transaction that opens the usage row.

        `CancelRequested` if a cancel was requested: then no call is made.
        """
        self._run_held(unit, self._call, lease, note_parameters(HistoryType.PROVIDER_CALLED))

    def lock_row(self, unit: Unit, lease: Lease) -> SavedOutput:
        """Lock the held job's row until the end of the transaction, for a projection, and return its saved output.

        `CancelRequested` if a cancel was requested, `LockLost` if the lease is lost.
        """
        row = read_rows(unit, LOCK_ROW, of(lease)).one_or_none()
        if row is None:
            raise self._refusal(unit, lease)
        return SavedOutput(row.output_hash, row.validated_output)

    def _held_transition(self, *where: ColumnElement[bool], inserts: Inserts = (), **values: Any) -> Transition:
        """Build a change of a held job, with its history row and `inserts`."""
        change = update(JOBS).where(*where).values(event_seq=AiJob.event_seq + 1, **values)
        history = (AiJobEvent, None, lambda job: history_row(job, self._clock))
        return Transition(change, inserts=(history, *inserts))

    def _run_held(self, unit: Unit, transition: Transition, lease: Lease, parameters: Mapping[str, Any]) -> None:
        instance = {"note_instance": lease.instance}
        if transition.run(unit, {**of(lease), **parameters, **instance}) is None:
            raise self._refusal(unit, lease)

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
