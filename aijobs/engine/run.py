"""One attempt in hand: what each stage of the engine is given, and what it adds."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from aijobs.ai.billing.usage import CallResult
from aijobs.clock import Stopwatch
from aijobs.definitions.definition import JobDefinition
from aijobs.engine.token import CancellationToken
from aijobs.jobs.lifecycle import Claim
from aijobs.jobs.models import AiJob
from aijobs.logs import LoggedJob, job_fields


@dataclass
class OpenCall:
    """A provider call whose usage row is open, and what it came to once that is known."""

    usage_id: str
    result: CallResult
    at: datetime
    """When it left, which is the time that its price is of."""
    watch: Stopwatch = field(default_factory=Stopwatch)


@dataclass
class Run:
    """One attempt of a job by this process."""

    job: AiJob
    claim: Claim
    definition: JobDefinition
    token: CancellationToken
    outbox_id: str | None = None
    """The event that asked for this attempt."""
    content: str | None = field(default=None, repr=False)
    """The job's input as JSON; None where it has expired, or where an output is saved."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    call: OpenCall | None = None
    """The last provider call, until its answer is saved; set and taken away by the attempt's own thread alone."""
    output: dict[str, Any] | None = None
    """The validated output, where this attempt made it and it isn't saved."""
    ending: Any = field(default_factory=threading.RLock)
    """Held by whoever ends the attempt: its own code, the watcher at the deadline or a cancel, or a drain. While
    it projects by the attempt's own code, as nobody else's write to the job's row could come through."""
    projecting: bool = False
    """The job type's projector runs just now, within that transaction."""
    ended: threading.Event = field(default_factory=threading.Event)
    """The attempt is over for the job: its slot is free, whether or not its code has returned."""
    returned: threading.Event = field(default_factory=threading.Event)
    """The attempt's code has returned."""
    outcome: str = "lost"

    def end(self, outcome: str) -> None:
        """Say how the attempt went, once."""
        if not self.ended.is_set():
            self.outcome = outcome
            self.ended.set()

    def fields(self, job: LoggedJob | None = None, error_code: str | None = None) -> dict[str, Any]:
        """The eight keys of a log line about this attempt."""
        return job_fields(
            job or self.job,
            outboxId=self.outbox_id,
            attemptNo=self.claim.attempt_no,
            durationMs=self.stopwatch.ms,
            errorCode=error_code,
        )
