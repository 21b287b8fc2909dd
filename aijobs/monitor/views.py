"""What the monitor answers: plain values, no rows of the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aijobs.ai.calling.breaker import BreakerState
from aijobs.ai.models import STARTED
from aijobs.jobs.status import FINAL

CAP = 10_001
"""How far counting goes."""


@dataclass(frozen=True)
class Count:
    """A number that is exact below `CAP`, and `10,000+` from there on."""

    value: int

    @property
    def capped(self) -> bool:
        return self.value >= CAP

    def __str__(self) -> str:
        return f"{CAP - 1:,}+" if self.capped else f"{self.value:,}"


@dataclass(frozen=True)
class JobRow:
    """One job as lists and answers show it: no input, no output, no internal message."""

    id: str
    user_id: str
    job_type: str
    target_type: str
    target_id: str
    queue_name: str
    priority: int
    lifecycle_status: str
    phase: str
    progress: int
    attempt_no: int
    retry_count: int
    lost_count: int
    uncharged_losses: int
    max_retry_count: int
    trigger_type: str
    credential_mode: str
    parent_job_id: str | None
    root_id: str
    locked_by: str | None
    lock_until: datetime | None
    next_attempt_at: datetime | None
    cancel_requested_at: datetime | None
    cancel_requested_by: str | None
    artifact_count: int
    error_code: str | None
    created_at: datetime
    queued_at: datetime | None
    """When the broker had it: `published_at` of its first enqueue event."""
    started_at: datetime | None
    finished_at: datetime | None
    retried_as: str | None
    """The job whose parent this one is."""
    newest_id: str
    """The newest job of its chain, which decides whether the work is done; its own id where it was never retried."""
    newest_status: str
    retry_refusal: str | None
    """Why it can't be retried (None: it can): not_final, succeeded, superseded, unknown_job_type."""
    cancel_refusal: str | None
    """Why it can't be cancelled (None: it can): final, cancel_requested, not_cancellable."""

    @property
    def final(self) -> bool:
        return self.lifecycle_status in FINAL

    @property
    def recovered_by(self) -> str | None:
        """The retry that did this job's work after all."""
        superseded = self.newest_id != self.id and self.newest_status == "succeeded"
        return self.newest_id if superseded else None

    @property
    def unresolved(self) -> bool:
        """Failed, and nothing was retried after it."""
        return self.lifecycle_status == "failed" and self.newest_id == self.id


@dataclass(frozen=True)
class Artifact:
    """Something in a business table that a job's output became."""

    artifact_type: str
    artifact_id: str


@dataclass(frozen=True)
class JobView:
    """One job of a user, with what it made."""

    job: JobRow
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True)
class HistoryEntry:
    """One change of a job's state, holder or plan."""

    seq: int
    type: str
    attempt_no: int
    actor: str
    instance: str | None
    error_code: str | None
    duration_ms: int | None
    at: datetime


@dataclass(frozen=True)
class OutboxRow:
    """One outbox event and how far it got."""

    id: str
    event_type: str
    job_id: str
    queue_name: str | None
    status: str
    attempt_count: int
    available_at: datetime
    locked_by: str | None
    locked_at: datetime | None
    published_at: datetime | None
    last_sent_at: datetime | None
    redrives: int
    last_error: str | None
    created_at: datetime

    @property
    def requeueable(self) -> bool:
        """A dead end event; the job of a dead enqueue event is retried instead."""
        return self.status == "dead" and self.event_type != "ai.job.enqueue"


@dataclass(frozen=True)
class UsageRow:
    """One provider call. `cost_micros` is None where it has no price, never 0 for unknown."""

    attempt_no: int
    call_no: int
    state: str
    provider: str
    model: str
    credential_mode: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    estimated: bool
    cost_micros: int | None
    currency: str | None
    price_version: str | None
    billed: str
    latency_ms: int | None
    finish_reason: str | None
    error_code: str | None
    http_status: int | None
    request_id: str | None
    """The provider's own name for the call, to settle a bill with."""
    started_at: datetime
    finished_at: datetime | None

    @property
    def unpriced(self) -> bool:
        """It ended, may have cost something, and nobody knows how much."""
        return self.state != STARTED and self.cost_micros is None and self.billed != "no"

    @property
    def possibly_billed(self) -> bool:
        """It ended, and nobody knows whether the provider bills it."""
        return self.state != STARTED and self.billed == "unknown"


@dataclass(frozen=True)
class CallCost:
    """What priced calls cost in one currency, in micro-units."""

    currency: str | None
    cost_micros: int


@dataclass(frozen=True)
class UsageTotal:
    """What provider calls came to. All of it is exact."""

    calls: int = 0
    failed_calls: int = 0
    """Lost ones too."""
    lost_calls: int = 0
    """Their worker went away before they ended."""
    calls_under_way: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Part of `prompt_tokens`; never to be added to them."""
    costs: tuple[CallCost, ...] = ()
    """One for each currency, of the calls that have a price; none where no call has."""
    unpriced_calls: int = 0
    """Calls that ended, may have cost something and have no price."""
    estimated_calls: int = 0
    """Calls whose tokens were counted here, as the provider told none."""
    possibly_billed_calls: int = 0
    """Calls that ended, and nobody knows whether the provider bills them."""


@dataclass(frozen=True)
class UsageGroup:
    """The calls that have something in common: their `day` (UTC), their `job_type` and so on."""

    total: UsageTotal
    day: str | None = None
    job_type: str | None = None
    provider: str | None = None
    model: str | None = None
    user_id: str | None = None


@dataclass(frozen=True)
class Usage:
    """Calls by group, and all of them together; `more`: there are groups that only the total counts."""

    groups: tuple[UsageGroup, ...]
    total: UsageTotal
    more: bool


@dataclass(frozen=True)
class SnapshotDescription:
    """What is told of a job's frozen input without showing it."""

    schema_version: str
    content_hash: str
    content_bytes: int
    redaction_version: str
    redaction_counts: Mapping[str, int]
    """How often each redaction rule found something: `{"email": 2}`."""
    expires_at: datetime


@dataclass(frozen=True)
class ChainLink:
    """One job of a retry chain."""

    id: str
    parent_job_id: str | None
    lifecycle_status: str
    error_code: str | None
    attempt_no: int
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True)
class JobDetail:
    """Everything of one job that an operator may see without revealing content."""

    job: JobRow
    input_schema_version: str
    output_schema_version: str
    prompt_version: str | None
    credential_id: str | None
    output_hash: str | None
    """Set once an answer is saved."""
    internal_error_message: str | None
    """Only where it was asked for."""
    snapshot: SnapshotDescription | None
    artifacts: tuple[Artifact, ...]
    history: tuple[HistoryEntry, ...]
    outbox: tuple[OutboxRow, ...]
    usage: tuple[UsageRow, ...]
    usage_total: UsageTotal
    chain: tuple[ChainLink, ...]
    """All jobs of its chain, the first one first."""
    chain_total: UsageTotal
    """Of the provider calls of all jobs of its chain, its own included."""
    read_at: datetime
    """The database's time of reading: ages are counted from here."""


@dataclass(frozen=True)
class Revealed:
    """The content of a job. Whoever asks for it has the right, gave a reason and is in the audit log."""

    snapshot: Any | None
    validated_output: Any | None


@dataclass(frozen=True)
class QueuePaused:
    """Why a queue takes no new job."""

    reason: str
    by: str
    at: datetime


@dataclass(frozen=True)
class QueueStatus:
    """One queue. What only the broker knows is None while it can't be reached."""

    queue_name: str
    broker_depth: int | None
    queued: Count
    """Jobs that wait for their first attempt, by the database."""
    retrying: Count
    """Running jobs that nobody holds: they wait for their next attempt."""
    active: Count
    """Running jobs that a worker holds."""
    oldest_queued_at: datetime | None
    oldest_age_s: float | None
    workers: int | None
    paused: QueuePaused | None


@dataclass(frozen=True)
class Wait:
    """Why a job that has not ended is where it is: one of `WAIT_REASONS`."""

    reason: str
    until: datetime | None = None
    """When it is asked for again, where that is told by the job itself and lies ahead."""
    breakers: tuple[BreakerState, ...] = ()
    """With `breaker_open`: those that keep its calls back, in the order of its routes."""


WAIT_REASONS = (
    "lease_expired",
    "cancelling",
    "running",
    "paused",
    "breaker_open",
    "providers_busy",
    "not_due",
    "broker_away",
    "no_worker",
    "not_sent",
    "in_line",
)


@dataclass(frozen=True)
class OutboxStatus:
    """The outbox at a glance."""

    counts: Mapping[str, Count]
    oldest_pending_at: datetime | None
    """Since when the oldest pending event has been due; None where none is due."""
    lag_s: float
    """For how long that event has been due; 0 where none is."""
    dead: tuple[OutboxRow, ...]
    """The newest fifty."""
    unknown_types: tuple[OutboxRow, ...]
    """Events that nobody knew what to do with; the newest fifty."""


@dataclass(frozen=True)
class HeldJob:
    """A job that a worker holds, by the database."""

    id: str
    job_type: str
    queue_name: str
    attempt_no: int
    lock_until: datetime | None


@dataclass(frozen=True)
class WorkerRow:
    """One worker process. `state`: live, late (its heartbeat is overdue) or lost (it holds jobs and has none)."""

    instance_id: str
    queue_name: str
    host: str
    pid: int | None
    started_at: str | None
    """ISO 8601, as its heartbeat says."""
    state: str
    age_s: float | None
    """Since its last heartbeat."""
    active_job_count: int
    """By its heartbeat; for one that is late or lost, by the database."""
    active_job_ids: tuple[str, ...]
    holds: tuple[HeldJob, ...]
    """What the database says it holds."""


@dataclass(frozen=True)
class Workers:
    """All workers that are known; `broker_away`: heartbeats can't be read, and who is lost can't be told."""

    broker_away: bool
    workers: tuple[WorkerRow, ...]


@dataclass(frozen=True)
class PassRow:
    """A duty of the maintenance consumers. `state`: on_time, failing (its last round did) or overdue (none has gone
    well for three periods, or ever)."""

    name: str
    state: str
    succeeded_at: str | None
    failed_at: str | None
    failures: int
    """Rounds in a row that failed."""
    error: str | None
    """The class of the last error, while it fails."""


@dataclass(frozen=True)
class CallSums:
    """What a day's calls of one model came to."""

    calls: int = 0
    failed: int = 0
    """Lost ones too."""
    under_way: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unpriced: int = 0
    """Calls that ended and have no price; never taken for free."""
    median_ms: int | None = None
    """Of the answers; None while there is none."""
    costs: tuple[CallCost, ...] = ()


@dataclass(frozen=True)
class ModelRow:
    """One model of a provider."""

    model: str
    today: CallSums


@dataclass(frozen=True)
class ProviderRow:
    """One AI provider."""

    name: str
    host: str | None
    """Of its base URL; None for the built-in one, and for one that is configured no more."""
    key: str
    """Whether the platform has a key there: yes, no or not_needed."""
    breaker: BreakerState
    """The platform's."""
    limit: int | None
    """Calls at once across all workers; None: any number."""
    in_flight: int | None
    """Calls under way, by the slots where there is a limit, else by the ledger; None while Redis is away."""
    models: tuple[ModelRow, ...]


@dataclass(frozen=True)
class Providers:
    """All AI providers, with their calls since `day`, midnight UTC."""

    day: datetime
    read_at: datetime
    providers: tuple[ProviderRow, ...]
    routes: Mapping[str, tuple[str, ...]]
    """By name, and by credential mode for users' keys: the models a call is tried at, `provider/model`, in turn."""
