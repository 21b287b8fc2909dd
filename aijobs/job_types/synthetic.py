"""A job whose input scripts its outcome: for tests, chaos and demonstrations; never in production.

In: `calls`, one entry per attempt, the last repeated: sleep so long, then raise that code or answer that output with
so many artifacts. Out: the entry's output and its number of artifacts. Leaves: artifact references, no business rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from aijobs.definitions.definition import (
    CREDENTIAL_MODES,
    PLATFORM_KEY,
    Credential,
    Execution,
    Input,
    JobDefinition,
    Metadata,
    Output,
    Queue,
    RetryBackoff,
    ScriptContext,
)
from aijobs.definitions.projector import Artifact, ProjectedJob, ProjectionResult
from aijobs.errors import JobError


class Call(BaseModel):
    """What one attempt does."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sleep_ms: int = Field(0, ge=0, le=600_000)
    raise_: str | None = Field(None, alias="raise", pattern=r"^[A-Z][A-Z_]{1,63}$")
    output: dict[str, Any] = Field(default_factory=dict)
    artifacts: int = Field(0, ge=0, le=1000)


class SyntheticInput(BaseModel):
    """The script: one entry per attempt, the last repeated."""

    model_config = ConfigDict(extra="forbid", strict=True)

    calls: list[Call] = Field(min_length=1, max_length=50)


class SyntheticOutput(BaseModel):
    """The entry's output and how many artifacts it stands for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    output: dict[str, Any]
    artifacts: int = Field(ge=0, le=1000)


def run(job_input: Mapping[str, Any], attempt_no: int, context: ScriptContext) -> dict[str, Any]:
    """Do what the entry of this attempt says."""
    calls = job_input["calls"]
    call = calls[min(attempt_no, len(calls)) - 1]
    if call.get("sleep_ms"):
        _sleep(context, call["sleep_ms"] / 1000)
    if call.get("raise"):
        raise JobError(call["raise"], "scripted by the job's input")
    return {"output": call.get("output", {}), "artifacts": call.get("artifacts", 0)}


def _sleep(context: ScriptContext, seconds: float) -> None:
    """Sleep as work goes on: in pieces, each of which is told."""
    pieces = max(1, min(20, int(2 * seconds)))
    for done in range(1, pieces + 1):
        context.sleep(seconds / pieces)
        context.progress(100 * done // pieces)


class SyntheticProjector:
    """References that stand for rows nobody needs."""

    key = "synthetic"

    def project(self, session: Session, job: ProjectedJob, validated_output: Mapping[str, Any]) -> ProjectionResult:
        return ProjectionResult(
            [Artifact("synthetic", f"{job.id}-{n}", n) for n in range(validated_output["artifacts"])]
        )


PROJECTOR = SyntheticProjector()

DEFINITION = JobDefinition(
    job_type="synthetic",
    metadata=Metadata(
        label="Synthetic job",
        description="Does what its input says: sleeps, fails with a code, or answers.",
        domain="maintenance",
        version="1",
        labels={"zh": "合成任务"},
    ),
    queue=Queue("ai-interactive", 50),
    execution=Execution(timeout_ms=600_000, max_retries=2, retry_backoff=RetryBackoff(1000), abort_strategy="retry"),
    input=Input("1", SyntheticInput),
    output=Output("1", SyntheticOutput),
    credential=Credential(CREDENTIAL_MODES, PLATFORM_KEY),
    projector="synthetic",
    script=run,
    production=False,
)

SAMPLE_INPUT = {"calls": [{"output": {"said": "hello"}, "artifacts": 2}]}
SAMPLE_OUTPUT = {"output": {"said": "hello"}, "artifacts": 2}
JUNK_OUTPUTS: tuple[dict[str, Any], ...] = ({}, {"output": 1, "artifacts": 0}, {"output": {}, "artifacts": -1})
