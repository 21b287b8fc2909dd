"""The definition of a job type.

The annotations are the rules: the registry refuses a definition that breaks one, and names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from aijobs.canonical import identifier_fault

Domain = Literal["analysis", "generation", "import", "maintenance"]
QueueName = Literal["ai-interactive", "ai-background"]
CredentialMode = Literal["platform_key", "user_deepseek_key"]

PLATFORM_KEY: CredentialMode = "platform_key"
USER_DEEPSEEK_KEY: CredentialMode = "user_deepseek_key"
USER_MODES: tuple[CredentialMode, ...] = (USER_DEEPSEEK_KEY,)
"""Modes in which calls use the user's own key, and the user pays."""
CREDENTIAL_MODES: tuple[CredentialMode, ...] = (PLATFORM_KEY, *USER_MODES)


JOB_TYPE = r"^[a-z][a-z0-9_]{1,63}$"
TIMEOUT_MS = (1_000, 600_000)


def _words(text: str) -> str:
    if not text.strip():
        raise ValueError("it needs a character that can be seen")
    return text


def _version(text: str) -> str:
    if len(text) > 32 or (fault := identifier_fault(text)):
        raise ValueError("it has 1–32 characters" if len(text) not in range(1, 33) else f"it {fault}")
    return text


Words = Annotated[str, AfterValidator(_words)]
Version = Annotated[str, AfterValidator(_version)]
"""1–32 characters, no space at either end. Versions are stored with each job, and compared."""


class _Part:
    """A definition or a part of one. Strict types: `True` is no int, an int no float, a number no text."""

    __pydantic_config__ = ConfigDict(strict=True, revalidate_instances="always")


@dataclass(frozen=True)
class QueuePolicy:
    """How a queue treats lost workers. A definition's retries are for errors; the two are counted apart."""

    queue_name: str
    attempts: int
    """The number of charged losses that ends the job: deaths of its own process."""
    backoff_ms: int
    """The wait before a takeover: backoff · 2^(losses − 1), losses of any kind."""
    concurrency: int


MOST_LOSSES = 5
"""Losses of any kind that end a job, on each queue."""
INTERACTIVE = QueuePolicy("ai-interactive", attempts=2, backoff_ms=2000, concurrency=2)
BACKGROUND = QueuePolicy("ai-background", attempts=3, backoff_ms=5000, concurrency=1)
QUEUES: Mapping[str, QueuePolicy] = {q.queue_name: q for q in (INTERACTIVE, BACKGROUND)}
MAINTENANCE_QUEUE = "ai-maintenance"


@dataclass(frozen=True)
class Metadata(_Part):
    """The texts about a job type. `labels` are in other languages, by language code."""

    label: Words
    description: Words
    domain: Domain
    version: Words
    labels: Mapping[str, Words] = field(default_factory=dict)


@dataclass(frozen=True)
class Queue(_Part):
    """The queue of the job. Priority: 0 is the highest, 100 the lowest."""

    queue_name: QueueName
    default_priority: Annotated[int, Field(ge=0, le=100)] = 50


@dataclass(frozen=True)
class RetryBackoff(_Part):
    """The wait before the n-th retry is `delay` · 2^(n−1) milliseconds."""

    delay: Annotated[int, Field(ge=1, le=3_600_000)]
    type: Literal["exponential"] = "exponential"


@dataclass(frozen=True)
class Execution(_Part):
    """Limits of an attempt. `max_retries` doesn't count the first attempt; `timeout_ms` covers a whole attempt."""

    timeout_ms: Annotated[int, Field(ge=TIMEOUT_MS[0], le=TIMEOUT_MS[1])]
    max_retries: Annotated[int, Field(ge=0, le=20)]
    retry_backoff: RetryBackoff
    cancellable: bool = True
    abort_strategy: Literal["fail", "retry"] = "fail"


@dataclass(frozen=True)
class Input(_Part):
    """The input's schema (a pydantic model) and its version."""

    schema_version: Version
    schema: type[BaseModel]


class CheckContext(Protocol):
    """What a check of an answer may ask of its attempt."""

    def raise_if_cancelled(self) -> None:
        """Raise `JobError` if the attempt must stop: cancelled, out of time, or its lease lost."""
        ...


@dataclass(frozen=True)
class Output(_Part):
    """The output's schema, its version, and a check beyond the schema.

    `validator(input, output, job_id)` returns the output to keep (it may drop items), or raises `JobError`. With
    `watches_token` it takes a `CheckContext` as a fourth argument: for checks of many items, which a cancel ends early.
    """

    schema_version: Version
    schema: type[BaseModel]
    validator: Callable[..., dict[str, Any]] | None = None
    watches_token: bool = False


@dataclass(frozen=True)
class Credential(_Part):
    """Whose key pays."""

    allowed_modes: Annotated[tuple[CredentialMode, ...], Field(min_length=1)] = (PLATFORM_KEY,)
    default_mode: CredentialMode = PLATFORM_KEY


@dataclass(frozen=True)
class Security(_Part):
    """What is checked and redacted: input and output by the safety rules, personal data in the saved output."""

    content_safety_check: bool = False
    output_redaction: bool = False


@dataclass(frozen=True)
class PromptRef(_Part):
    """A versioned prompt: `name` is a folder of prompts, `version` is for new jobs."""

    name: Words
    version: Version


Script = Callable[[Mapping[str, Any], int, "ScriptContext"], dict[str, Any]]
"""The work of a job type that calls no provider: (input, attempt, context) to output."""


class ScriptContext(Protocol):
    """What a script may ask of its attempt."""

    def sleep(self, seconds: float) -> None:
        """Wait, or raise `JobError` as soon as the attempt is cancelled or out of time."""
        ...

    def progress(self, percent: int) -> None:
        """Report that the work is done to `percent` (0–100). Call it as often as you like; it is shown twice a second
        at most.
        """
        ...


@dataclass(frozen=True)
class JobDefinition(_Part):
    """All that engine, API and console need of a job type."""

    job_type: Annotated[str, Field(pattern=JOB_TYPE)]
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
    max_output_tokens: Annotated[int, Field(ge=1, le=200_000)] = 8_000
    """Maximum tokens of an answer. After a truncated answer twice as many, and so on."""
    script: Script | None = None
    """Replaces the prompt in a type that calls no provider and leaves no usage row."""
    rebuild: Callable[[str, str], dict[str, Any] | None] | None = None
    """`rebuild(target_type, target_id)` returns the input again, for a retry whose snapshot has expired."""
    production: bool = True
    """Whether the type is registered in production too."""
