"""A job type whose input scripts its provider and its projector, loaded as a plug-in.

Input: the number of items, the provider call of each attempt, and the attempts in which the projector raises. Output:
the items. Artifacts: one Flashcard row per item, so that a duplicate or partial result is visible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from aijobs.clock import utc_now
from aijobs.definitions import definition as d
from aijobs.definitions.projector import Artifact, ProjectedJob, ProjectionResult
from aijobs.learning.models import Flashcard

JOB_TYPE = "chaos"
ARTIFACT_TYPE = "Item"


class ProviderCall(BaseModel):
    """The script of the provider in one attempt: wait, then fail with a code, or answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sleep_ms: int = Field(0, ge=0, le=60_000)
    raise_: str | None = Field(None, alias="raise")
    dies: bool = False
    """The worker process is killed during the call."""
    garbled: bool = False
    """The answer isn't JSON."""


class Input(BaseModel):
    """The script; later attempts use the last call again."""

    model_config = ConfigDict(extra="forbid", strict=True)

    items: int = Field(ge=1, le=20)
    calls: list[ProviderCall] = Field(min_length=1)
    projector_raises: list[int] = Field(default_factory=list)
    """The attempts in which the projector raises after writing its rows."""


class Output(BaseModel):
    """The items and the projector's part of the script."""

    model_config = ConfigDict(extra="forbid", strict=True)

    items: list[str] = Field(min_length=1)
    projector_raises: list[int]


def answer(job_input: Mapping[str, Any], call: Mapping[str, Any]) -> str:
    """Return the provider's text for one call."""
    if call.get("garbled"):
        return "I am sorry, here is your list:"
    items = [f"item {n}" for n in range(job_input["items"])]
    return json.dumps({"items": items, "projector_raises": job_input.get("projector_raises", [])})


class ItemProjector:
    """Writes the items, and then raises if the script says so."""

    key = "chaos"

    def project(self, session: Session, job: ProjectedJob, validated_output: Mapping[str, Any]) -> ProjectionResult:
        """Write one row per item."""
        rows = [
            Flashcard(
                user_id=job.user_id,
                job_id=job.id,
                ordinal=ordinal,
                card_type="basic",
                front=item,
                back=item,
                tags=[],
                evidence=[],
                lang="en",
                source_id=job.target_id,
                source_title="chaos",
                created_at=utc_now(),
            )
            for ordinal, item in enumerate(validated_output["items"])
        ]
        session.add_all(rows)
        session.flush()
        if job.attempt_no in validated_output["projector_raises"]:
            raise ValueError("scripted by the job's input")
        return ProjectionResult([Artifact(ARTIFACT_TYPE, row.id, row.ordinal) for row in rows])


PROJECTOR = ItemProjector()

DEFINITION = d.JobDefinition(
    job_type=JOB_TYPE,
    metadata=d.Metadata(
        label="Chaos", description="Runs the script in its input with a provider.", domain="maintenance", version="1"
    ),
    queue=d.Queue("ai-interactive", 40),
    execution=d.Execution(
        timeout_ms=30_000, max_retries=2, retry_backoff=d.RetryBackoff(300), cancellable=True, abort_strategy="retry"
    ),
    input=d.Input("1", Input),
    output=d.Output("1", Output),
    projector="chaos",
    prompt=d.PromptRef("chaos", "v1"),
    route="built_in",
    production=False,
)
