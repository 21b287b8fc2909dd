"""What the engine must know of a job type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel

Domain = Literal["analysis", "generation", "import", "maintenance"]
QueueName = Literal["ai-interactive", "ai-background"]
CredentialMode = Literal["platform_key", "user_deepseek_key"]

DOMAINS = ("analysis", "generation", "import", "maintenance")
PLATFORM_KEY: CredentialMode = "platform_key"
USER_DEEPSEEK_KEY: CredentialMode = "user_deepseek_key"
USER_MODES: tuple[CredentialMode, ...] = (USER_DEEPSEEK_KEY,)
"""Those whose calls run on a key of the user's own, and are paid by the user."""
CREDENTIAL_MODES: tuple[CredentialMode, ...] = (PLATFORM_KEY, *USER_MODES)


@dataclass(frozen=True)
class QueuePolicy:
    """How a queue treats lost workers; a definition's retries are for errors, and the two never multiply."""

    queue_name: str
    attempts: int
    """How many attempts may be lost, the last of which ends the job."""
    backoff_ms: int
    """The wait before a takeover: backoff · 2^(lost_count − 1)."""
    concurrency: int


INTERACTIVE = QueuePolicy("ai-interactive", attempts=2, backoff_ms=2000, concurrency=2)
BACKGROUND = QueuePolicy("ai-background", attempts=3, backoff_ms=5000, concurrency=1)
QUEUES: Mapping[str, QueuePolicy] = {q.queue_name: q for q in (INTERACTIVE, BACKGROUND)}
MAINTENANCE_QUEUE = "ai-maintenance"


@dataclass(frozen=True)
class Metadata:
    """What a person is told of a job type. `labels` holds it in other languages, by language code."""

    label: str
    description: str
    domain: Domain
    version: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Queue:
    """Where the job waits. Priority: 0 is the highest, 100 the lowest."""

    queue_name: QueueName
    default_priority: int = 50


@dataclass(frozen=True)
class RetryBackoff:
    """The wait before the n-th retry is `delay` · 2^(n−1) milliseconds."""

    delay: int
    type: Literal["exponential"] = "exponential"


@dataclass(frozen=True)
class Execution:
    """Limits of an attempt. `max_retries` doesn't count the first attempt; `timeout_ms` covers a whole attempt."""

    timeout_ms: int
    max_retries: int
    retry_backoff: RetryBackoff
    cancellable: bool = True
    abort_strategy: Literal["fail", "retry"] = "fail"


@dataclass(frozen=True)
class Input:
    """The input's schema (a pydantic model) and its version."""

    schema_version: str
    schema: type[BaseModel]


class CheckContext(Protocol):
    """What a check of an answer may ask of the attempt that it is part of."""

    def raise_if_cancelled(self) -> None:
        """Raise `JobError` if the attempt must stop: cancelled, out of time, or its lease lost."""
        ...


@dataclass(frozen=True)
class Output:
    """The output's schema, its version, and a check beyond the schema.

    `validator(input, output, job_id)` returns the output to keep (it may drop items), or raises `JobError`. With
    `watches_token` it takes a `CheckContext` as a fourth argument: for checks of many items, which a cancel ends early.
    """

    schema_version: str
    schema: type[BaseModel]
    validator: Callable[..., dict[str, Any]] | None = None
    watches_token: bool = False


@dataclass(frozen=True)
class Credential:
    """Whose key pays."""

    allowed_modes: tuple[CredentialMode, ...] = (PLATFORM_KEY,)
    default_mode: CredentialMode = PLATFORM_KEY


@dataclass(frozen=True)
class Security:
    """What is checked and hidden: input and output by the safety rules, personal data in the saved output."""

    content_safety_check: bool = False
    output_redaction: bool = False


@dataclass(frozen=True)
class PromptRef:
    """A versioned prompt: `name` is a folder of prompts, `version` the one that new jobs get."""

    name: str
    version: str


Script = Callable[[Mapping[str, Any], int, "ScriptContext"], dict[str, Any]]
"""A job type's own work, for types that ask no provider: (input, attempt, context) to output."""


class ScriptContext(Protocol):
    """What a script may ask of the attempt that runs it."""

    def sleep(self, seconds: float) -> None:
        """Wait, or raise `JobError` as soon as the attempt is cancelled or out of time."""
        ...

    def progress(self, percent: int) -> None:
        """Say that the work is done to `percent` (0–100): as often as you like, shown twice a second at most."""
        ...


@dataclass(frozen=True)
class JobDefinition:
    """Everything the engine, the API and the console need of a job type."""

    job_type: str
    metadata: Metadata
    queue: Queue
    execution: Execution
    input: Input
    output: Output
    credential: Credential = Credential()
    security: Security = Security()
    projector: str | None = None
    prompt: PromptRef | None = None
    route: str | None = None
    """The name of a configured route; None: the default one."""
    max_output_tokens: int = 8_000
    """The most that a provider is asked to write. After an answer that was cut off, twice as many, and so on."""
    script: Script | None = None
    """Instead of a prompt, for a type that asks no provider and leaves no usage row."""
    rebuild: Callable[[str, str], dict[str, Any] | None] | None = None
    """`rebuild(target_type, target_id)`: the input again, for a retry whose snapshot has expired."""
    production: bool = True
    """Whether the type is registered in production too."""
