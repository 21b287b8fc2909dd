"""The answers of the monitor: plain values, no database rows. The APIs send the same classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from operator import not_
from typing import Annotated, Any

from pydantic import Field, PlainSerializer, WithJsonSchema, computed_field

from aijobs.ai.calling.breaker import BreakerState
from aijobs.ai.models import CallState
from aijobs.answers import (
    FOR_SOME,
    TIME,
    Answer,
    Flattened,
    Maybe,
    Milliseconds,
    Natural,
    Time,
    is_none,
    one_of,
)
from aijobs.definitions.definition import QUEUES
from aijobs.jobs.history import HistoryType
from aijobs.jobs.status import FINAL, JobState, Phase
from aijobs.outbox.models import OutboxEventType, OutboxState
from aijobs.queues.state import BROKER_STATES, OK
from aijobs.screening.sensitive import FINDERS

CAP = 10_001
"""Upper limit of counts."""


@dataclass(frozen=True)
class Count:
    """A number that is exact below `CAP`, and `10,000+` from there on."""

    value: int

    @property
    def capped(self) -> bool:
        return self.value >= CAP

    def __str__(self) -> str:
        return f"{CAP - 1:,}+" if self.capped else f"{self.value:,}"


_COUNT = {
    "type": "integer",
    "minimum": 0,
    "maximum": CAP,
    "description": f"Counted up to {CAP}, which stands for {CAP - 1} or more.",
}
_OUTBOX_COUNTS = {
    "type": "object",
    "properties": dict.fromkeys(OutboxState, _COUNT),
    "required": list(OutboxState),
    "additionalProperties": False,
}
_REDACTIONS = {
    "type": "object",
    "propertyNames": {"enum": sorted({kind.lower() for kind, _ in FINDERS})},
    "additionalProperties": {"type": "integer", "minimum": 1},
    "description": "How often each redaction rule found something; rules that found nothing are left out.",
}
WAIT_REASONS = (
    "lease_expired",
    "cancelling",
    "running",
    "paused",
    "breaker_open",
    "providers_busy",
    "not_due",
    "broker_away",
    "broker_refuses",
    "no_worker",
    "not_sent",
    "in_line",
)
CappedCount = Annotated[Count, PlainSerializer(lambda count: count.value), WithJsonSchema(_COUNT)]
Status = Annotated[str, one_of(JobState)]
Percent = Annotated[int, Field(ge=0, le=100)]


@dataclass(frozen=True, kw_only=True)
class PublicJob(Answer):
    """A job for its user: no input, no output, no internal message."""

    id: Annotated[str, Field(serialization_alias="jobId")]
    job_type: str
    lifecycle_status: Status
    phase: Annotated[str, one_of(Phase)]
    queue_name: Annotated[str, one_of(QUEUES)]
    priority: Percent
    progress: Percent
    attempt_no: Annotated[Natural, Field(serialization_alias="attempt")]
    created_at: Time
    queued_at: Maybe[Time]
    """When the job was queued: `published_at` of its first enqueue event."""
    started_at: Maybe[Time]
    finished_at: Maybe[Time]
    next_attempt_at: Maybe[Time]
    cancel_requested_at: Maybe[Time]
    retried_as: Maybe[str]
    """The retry of this job."""
    error_code: Maybe[str]
    public_error_message: Maybe[str] = None
    """In the reader's language. The web layer sets it."""


@dataclass(frozen=True, kw_only=True)
class JobRow(PublicJob):
    """A job in operators' lists."""

    schema_name = "AdminJob"

    user_id: str
    target_type: str
    target_id: str
    trigger_type: Annotated[str, one_of(("user", "admin", "system"))]
    credential_mode: str
    parent_job_id: Maybe[str]
    root_id: str
    retry_count: Natural
    lost_count: Natural
    uncharged_losses: Natural
    max_retry_count: Natural
    locked_by: Maybe[str]
    lock_until: Maybe[Time]
    cancel_requested_by: Maybe[str]
    artifact_count: Natural
    newest_id: Annotated[str, Field(serialization_alias="newestJobId")]
    """The newest job of its chain, which shows whether the work is done; its own id if it was never retried."""
    newest_status: Annotated[Status, Field(serialization_alias="newestLifecycleStatus")]
    retry_refusal: Maybe[Annotated[str, one_of(("not_final", JobState.SUCCEEDED, "superseded", "unknown_job_type"))]]
    """Why it can't be retried (None: it can)."""
    cancel_refusal: Maybe[Annotated[str, one_of(("final", Phase.CANCEL_REQUESTED, "not_cancellable"))]]
    """Why it can't be cancelled (None: it can)."""

    @property
    def final(self) -> bool:
        return self.lifecycle_status in FINAL

    @computed_field  # type: ignore[prop-decorator]
    @property
    def retryable(self) -> bool:
        return self.retry_refusal is None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cancellable(self) -> bool:
        return self.cancel_refusal is None

    @computed_field(exclude_if=is_none)  # type: ignore[prop-decorator]
    @property
    def recovered_by(self) -> Maybe[str]:
        """The retry that succeeded."""
        superseded = self.newest_id != self.id and self.newest_status == JobState.SUCCEEDED
        return self.newest_id if superseded else None

    @property
    def unresolved(self) -> bool:
        """Failed and not retried."""
        return self.lifecycle_status == JobState.FAILED and self.newest_id == self.id


@dataclass(frozen=True)
class Artifact(Answer):
    """A row of a business table that was made from a job's output."""

    artifact_type: str
    artifact_id: str


@dataclass(frozen=True)
class Result(Answer):
    """The result of a succeeded job."""

    artifact_count: Natural
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True)
class JobView:
    """A job of a user, with its artifacts."""

    job: JobRow
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True)
class UserJob(Flattened):
    """A job of the user who asks."""

    schema_name = "Job"
    flattened = "job"

    job: PublicJob
    result: Maybe[Result]


@dataclass(frozen=True)
class HistoryEntry(Answer):
    """One change of a job's state, lease or plan."""

    seq: Natural
    type: Annotated[str, one_of(HistoryType)]
    attempt_no: Annotated[Natural, Field(serialization_alias="attempt")]
    actor: str
    instance: Maybe[str]
    error_code: Maybe[str]
    duration_ms: Maybe[int]
    at: Time


@dataclass(frozen=True)
class OutboxRow(Answer):
    """An outbox event and its state, without dedupe key and payload."""

    schema_name = "OutboxEvent"

    id: Annotated[str, Field(serialization_alias="eventId")]
    event_type: str
    job_id: str
    queue_name: Maybe[str]
    status: Annotated[str, one_of(OutboxState)]
    attempt_count: Natural
    available_at: Time
    locked_by: Maybe[str]
    locked_at: Maybe[Time]
    published_at: Maybe[Time]
    last_sent_at: Maybe[Time]
    redrives: Natural
    last_error: Maybe[str]
    created_at: Time

    @computed_field  # type: ignore[prop-decorator]
    @property
    def requeueable(self) -> bool:
        """Whether it is a dead end event. The job of a dead enqueue event is retried instead."""
        return self.status == OutboxState.DEAD and self.event_type != OutboxEventType.ENQUEUE


@dataclass(frozen=True)
class UsageRow(Answer):
    """One provider call. Without the right to see usage, tokens and cost are left out."""

    schema_name = "ProviderCall"

    attempt_no: Annotated[Natural, Field(serialization_alias="attempt")]
    call_no: Annotated[Natural, Field(serialization_alias="call")]
    state: Annotated[str, one_of(CallState)]
    provider: str
    model: str
    credential_mode: str
    prompt_tokens: Maybe[Natural]
    completion_tokens: Maybe[Natural]
    cached_tokens: Maybe[Natural]
    estimated: bool
    cost_micros: Annotated[
        int | None, FOR_SOME, Field(description="Millionths of `currency`; null: no price is known.")
    ]
    currency: Maybe[str]
    price_version: Maybe[str]
    billed: Annotated[str, one_of(("yes", "no", "unknown"))]
    latency_ms: Maybe[Natural]
    finish_reason: Maybe[str]
    error_code: Maybe[str]
    http_status: Maybe[Natural]
    request_id: Annotated[Maybe[str], Field(description="The provider's own name for the call.")]
    started_at: Time
    finished_at: Maybe[Time]

    @property
    def unpriced(self) -> bool:
        """It ended and may have cost something, but the cost is unknown."""
        return self.state != CallState.STARTED and self.cost_micros is None and self.billed != "no"

    @property
    def possibly_billed(self) -> bool:
        """It ended, and whether the provider bills it is unknown."""
        return self.state != CallState.STARTED and self.billed == "unknown"


@dataclass(frozen=True)
class CallCost(Answer):
    """The cost of priced calls in one currency, in micro-units."""

    currency: Maybe[str]
    cost_micros: int


@dataclass(frozen=True)
class UsageTotal(Answer):
    """Exact sums of provider calls."""

    calls: Natural = 0
    failed_calls: Annotated[Natural, Field(description="Lost ones too.")] = 0
    lost_calls: Annotated[Natural, Field(description="Their worker went away before they ended.")] = 0
    calls_under_way: Natural = 0
    prompt_tokens: Natural = 0
    completion_tokens: Natural = 0
    cached_tokens: Annotated[Natural, Field(description="Part of `promptTokens`.")] = 0
    costs: Annotated[
        tuple[CallCost, ...],
        Field(description="One for each currency, in millionths; empty where no call has a price."),
    ] = ()
    unpriced_calls: Annotated[
        Natural, Field(description="Calls that ended, may have cost something and have no price.")
    ] = 0
    estimated_calls: Annotated[
        Natural, Field(description="Calls whose tokens were counted here, not by the provider.")
    ] = 0
    possibly_billed_calls: Annotated[
        Natural, Field(description="Calls that ended, and nobody knows whether they are billed.")
    ] = 0


@dataclass(frozen=True)
class UsageGroup(Flattened):
    """Sums of the calls of one group: of a `day` (UTC), a `job_type` and so on."""

    flattened = "total"

    total: UsageTotal
    day: Maybe[Annotated[str, WithJsonSchema({"type": "string", "format": "date"})]] = None
    job_type: Maybe[str] = None
    provider: Maybe[str] = None
    model: Maybe[str] = None
    user_id: Maybe[str] = None


@dataclass(frozen=True)
class Usage(Answer):
    """Sums by group, and the total."""

    schema_name = "UsageSums"

    groups: tuple[UsageGroup, ...]
    total: UsageTotal
    more: bool
    """Whether there are more groups, which only the total includes."""


@dataclass(frozen=True)
class SnapshotDescription(Answer):
    """A description of a job's input, without its content."""

    schema_name = "Snapshot"

    schema_version: str
    content_hash: str
    content_bytes: Natural
    redaction_version: str
    redaction_counts: Annotated[Mapping[str, int], WithJsonSchema(_REDACTIONS)]
    """Replacements by each redaction rule: `{"email": 2}`."""
    expires_at: Time


@dataclass(frozen=True)
class ChainLink(Answer):
    """One job of a retry chain."""

    id: Annotated[str, Field(serialization_alias="jobId")]
    parent_job_id: Maybe[str]
    lifecycle_status: Status
    error_code: Maybe[str]
    attempt_no: Annotated[Natural, Field(serialization_alias="attempt")]
    created_at: Time
    finished_at: Maybe[Time]


@dataclass(frozen=True)
class Wait(Answer):
    """Why a job that hasn't ended waits or runs."""

    schema_name = "Waiting"

    reason: Annotated[str, one_of(WAIT_REASONS)]
    until: Maybe[Time] = None
    """When the job runs next, if that time is known and in the future."""
    breakers: Annotated[tuple[BreakerState, ...], Field(exclude_if=not_)] = ()
    """With `breaker_open`: the breakers that block its calls, in the order of its routes."""
    cause: Maybe[str] = None
    """With `broker_away` and `broker_refuses`: what is wrong with the broker, in English."""
    explanation: str = ""
    """In the reader's language. The web layer sets it."""


@dataclass(frozen=True)
class JobDetail(Flattened):
    """Everything of a job that an operator may see without a reveal."""

    schema_name = "AdminJobDetail"
    flattened = "job"

    job: JobRow
    input_schema_version: str
    output_schema_version: str
    prompt_version: Maybe[str]
    credential_id: Maybe[str]
    output_hash: Maybe[str]
    """Set when an answer is saved."""
    internal_error_message: Annotated[Maybe[str], Field(description="For SUPER_ADMIN alone.")]
    """Set only if it was asked for."""
    snapshot: Maybe[SnapshotDescription]
    artifacts: tuple[Artifact, ...]
    history: tuple[HistoryEntry, ...]
    outbox: tuple[OutboxRow, ...]
    usage: tuple[UsageRow, ...]
    usage_total: Annotated[UsageTotal, FOR_SOME]
    chain: tuple[ChainLink, ...]
    """All jobs of its chain, oldest first."""
    chain_total: Annotated[UsageTotal, FOR_SOME]
    """Sums of the provider calls of all jobs of its chain, including its own."""
    read_at: Annotated[datetime, Field(exclude=True)]
    """The database's time of the read. Ages are counted from it."""
    waiting: Maybe[Wait] = None
    loss_explanation: Maybe[str] = None
    """In the reader's language. The web layer sets it."""


@dataclass(frozen=True)
class Revealed:
    """The content of a job, for an operator who has the right, gave a reason and is in the audit log."""

    snapshot: Any | None
    validated_output: Any | None


@dataclass(frozen=True)
class QueuePaused(Answer):
    """The pause of a queue."""

    reason: str
    by: str
    at: Time


@dataclass(frozen=True)
class QueueStatus(Answer):
    """The state of a queue. The broker's part is None while it is away."""

    queue_name: str
    broker: Annotated[str, one_of(BROKER_STATES)]
    """Whether the broker takes messages of this queue."""
    broker_cause: Maybe[str]
    broker_depth: Natural | None
    queued: CappedCount
    """Jobs that wait for their first attempt, by the database."""
    retrying: CappedCount
    """Running jobs that nobody holds. They wait for their next attempt."""
    active: CappedCount
    """Running jobs that a worker holds."""
    oldest_queued_at: Maybe[Time]
    oldest_age_s: Annotated[Maybe[Milliseconds], Field(serialization_alias="oldestAgeMs")]
    workers: Natural | None
    paused: Maybe[QueuePaused]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def waiting(self) -> Natural:
        return self.queued.value + self.retrying.value


@dataclass(frozen=True)
class OutboxStatus(Answer):
    """The state of the outbox."""

    counts: Annotated[Mapping[str, CappedCount], WithJsonSchema(_OUTBOX_COUNTS)]
    oldest_pending_at: Maybe[Time]
    """Due time of the oldest pending event; None if none is due."""
    lag_s: Annotated[Milliseconds, Field(serialization_alias="lagMs")]
    """How long that event has been due; 0 if none is."""
    dead: tuple[OutboxRow, ...]
    """The newest fifty dead events."""
    unknown_types: tuple[OutboxRow, ...]
    """The newest fifty events of unknown types."""


@dataclass(frozen=True)
class HeldJob(Answer):
    """A job that a worker holds, by the database."""

    id: str
    job_type: str
    queue_name: str
    attempt_no: Natural
    lock_until: Maybe[Time]


@dataclass(frozen=True)
class WorkerRow(Answer):
    """A worker process.

    `state`: stalled (it takes no message though some wait), late (its heartbeat is overdue), lost (it holds jobs and
    has no heartbeat), unknown (the broker, which has the heartbeats, is away).
    """

    schema_name = "Worker"

    instance_id: str
    queue_name: str
    host: str
    pid: Maybe[Natural]
    started_at: Maybe[Annotated[str, WithJsonSchema(TIME)]]
    """Start time, by its heartbeat."""
    state: Annotated[str, one_of(("live", "stalled", "late", "lost", "unknown"))]
    age_s: Annotated[Maybe[Milliseconds], Field(serialization_alias="heartbeatAgeMs")]
    """Time since its last heartbeat."""
    active_job_count: Natural
    """By its heartbeat; for a late or lost one, by the database."""
    active_job_ids: tuple[str, ...]
    holds: tuple[HeldJob, ...]
    """The jobs that it holds, by the database."""
    slots: Maybe[Natural]
    """Number of jobs that it runs at once, by its heartbeat."""
    policy_slots: Maybe[Natural]
    """Number of jobs per process by its queue's policy; None for a queue without jobs."""
    popped_s: Annotated[Maybe[Milliseconds], Field(serialization_alias="lastPopAgeMs")] = None
    """Time since it last took a message; None if it took none, or if unknown."""


@dataclass(frozen=True)
class Workers(Answer):
    """All known workers. `broker_away`: heartbeats can't be read, so it is unknown who is lost."""

    schema_name = "WorkerList"

    broker_away: bool
    workers: tuple[WorkerRow, ...]
    broker: Annotated[str, one_of(BROKER_STATES)] = OK
    """If it takes no writes, workers can't write their heartbeats either."""
    broker_cause: Maybe[str] = None


@dataclass(frozen=True)
class PassRow:
    """A pass of the maintenance consumers. `state`: on_time, failing (the last run did) or overdue (no success for
    three periods, or ever).
    """

    name: str
    state: str
    succeeded_at: str | None
    failed_at: str | None
    failures: int
    """Failed runs in a row."""
    error: str | None
    """The class of the last error, while it fails."""


@dataclass(frozen=True)
class CallSums(Answer):
    """Sums of a day's calls of one model."""

    calls: Natural = 0
    failed: Annotated[Natural, Field(serialization_alias="failedCalls")] = 0
    """Including lost ones."""
    under_way: Annotated[Natural, Field(serialization_alias="callsUnderWay")] = 0
    prompt_tokens: Annotated[Natural, FOR_SOME] = 0
    completion_tokens: Annotated[Natural, FOR_SOME] = 0
    unpriced: Annotated[Natural, FOR_SOME, Field(serialization_alias="unpricedCalls")] = 0
    """Ended calls without a price. They never count as free."""
    median_ms: Annotated[Maybe[Natural], Field(serialization_alias="medianLatencyMs")] = None
    """Median of the answers; None without any."""
    costs: Annotated[tuple[CallCost, ...], FOR_SOME] = ()


@dataclass(frozen=True)
class ModelRow(Flattened):
    """One model of a provider."""

    schema_name = "ProviderModel"
    flattened = "today"

    model: str
    today: CallSums


@dataclass(frozen=True)
class ProviderRow(Answer):
    """One AI provider."""

    schema_name = "Provider"

    name: str
    host: Maybe[str]
    """Host of its base URL; None for the built-in one, and for one that isn't configured any more."""
    key: Annotated[str, one_of(("yes", "no", "not_needed"))]
    """Whether the platform has a key."""
    breaker: BreakerState
    """The platform's breaker."""
    limit: Annotated[
        Maybe[Annotated[int, Field(ge=1)]],
        Field(serialization_alias="callLimit", description="Left out where there is none."),
    ]
    """Maximum concurrent calls across all workers; None: no limit."""
    in_flight: Annotated[
        Maybe[Natural], Field(serialization_alias="callsInFlight", description="Left out while Redis can't tell.")
    ]
    """Running calls, by the slots if there is a limit, otherwise by the usage rows; None while Redis is away."""
    models: tuple[ModelRow, ...]


@dataclass(frozen=True)
class Providers(Answer):
    """All AI providers, with their calls since `day`, midnight UTC."""

    schema_name = "ProviderList"

    day: Time
    read_at: Annotated[datetime, Field(exclude=True)]
    providers: tuple[ProviderRow, ...]
    routes: Annotated[Mapping[str, tuple[str, ...]], Field(exclude=True)]
    """Routes by name, and by credential mode for users' keys: the models `provider/model`, in order."""
