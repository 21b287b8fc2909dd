"""The chaos job with a server as its provider, loaded as a second plug-in.

Input: the note, the number of items, and the attempts in which the projector raises. Output and artifacts: as in the
chaos job.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from aijobs.definitions import definition as d
from tests.chaos import chaos_job

JOB_TYPE = ROUTE = "served"


class Input(BaseModel):
    """The contents of the prompt; the server has the script."""

    model_config = ConfigDict(extra="forbid", strict=True)

    note: str
    items: int = Field(ge=1, le=20)
    projector_raises: list[int] = Field(default_factory=list)


DEFINITION = replace(
    chaos_job.DEFINITION,
    job_type=JOB_TYPE,
    metadata=replace(chaos_job.DEFINITION.metadata, label="Served chaos"),
    # More than any script needs, because the server may be down and workers may be suspended during a call.
    execution=replace(chaos_job.DEFINITION.execution, max_retries=4),
    input=d.Input("1", Input),
    route=ROUTE,
)
