"""The chaos job with a server for its provider, brought in as a second plug-in: its calls go over a socket, to whatever
the run's provider does.

In: for which note, how many items, and at which attempts the projector raises. Out and leaves: as the chaos job.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from aijobs.definitions import definition as d
from tests.chaos import chaos_job

JOB_TYPE = ROUTE = "served"


class Input(BaseModel):
    """What the prompt says; the script is the server's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    note: str
    items: int = Field(ge=1, le=20)
    projector_raises: list[int] = Field(default_factory=list)


DEFINITION = replace(
    chaos_job.DEFINITION,
    job_type=JOB_TYPE,
    metadata=replace(chaos_job.DEFINITION.metadata, label="Served chaos"),
    # More tries than any script takes: on top of it the server is away, and workers are frozen in the middle of a call.
    execution=replace(chaos_job.DEFINITION.execution, max_retries=4),
    input=d.Input("1", Input),
    route=ROUTE,
)
