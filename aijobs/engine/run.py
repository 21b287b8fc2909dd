"""One attempt: what the stages of the engine are given, and what they add."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from aijobs.ai.billing.usage import CallResult
from aijobs.clock import Stopwatch
from aijobs.definitions.definition import JobDefinition
from aijobs.engine.child import Child
from aijobs.engine.outcome import Outcome
from aijobs.engine.token import CancellationToken
from aijobs.jobs.lease import HeldJob, Lease
from aijobs.logs import LoggedJob, job_fields


@dataclass
class OpenCall:
    """A provider call whose usage row is open, and its result as far as it is known."""

    usage_id: str
    result: CallResult
    at: datetime
    """When the request left. The prices of that time apply."""
    watch: Stopwatch = field(default_factory=Stopwatch)


@dataclass
class Run:
    """One attempt of a job by this process."""

    job: HeldJob
    lease: Lease
    definition: JobDefinition
    token: CancellationToken
    outbox_id: str | None = None
    """The event that asked for this attempt."""
    content: str | None = field(default=None, repr=False)
    """The job's input as JSON; None if it has expired, or if an output is saved."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    call: OpenCall | None = None
    """The last provider call, until its answer is saved. Only the attempt's own thread sets and clears it."""
    output: dict[str, Any] | None = None
    """The validated output, if this attempt made it and it isn't saved."""
    child: Child | None = None
    """The child process that runs the attempt, if one does."""
    end_lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while the attempt is being ended, and by its own code during PROJECT: its transaction has the job's row."""
    projecting: bool = False
    """The job type's projector is running, inside that transaction."""
    ended: threading.Event = field(default_factory=threading.Event)
    """The attempt has ended and its slot is free, even if its code has not returned."""
    outcome: Outcome | None = None
    """How the attempt ended; None while it is open."""

    def end(self, outcome: Outcome) -> None:
        """Set the outcome, once. Called by `Ending`, with `end_lock` held."""
        if self.outcome is None:
            self.outcome = outcome
            self.ended.set()

    def fields(self, job: LoggedJob | None = None, error_code: str | None = None) -> dict[str, Any]:
        """Return the eight keys of a log line about this attempt."""
        return job_fields(
            job or self.job,
            outboxId=self.outbox_id,
            attemptNo=self.lease.attempt_no,
            durationMs=self.stopwatch.ms,
            errorCode=error_code,
        )
