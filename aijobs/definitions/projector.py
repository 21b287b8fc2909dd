"""Turn a validated output into rows of business tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sqlalchemy.orm import Session


class Artifact(NamedTuple):
    """A reference to a business row."""

    artifact_type: str
    artifact_id: str
    ordinal: int


@dataclass(frozen=True)
class ProjectionResult:
    """The artifacts of a projection, new or existing."""

    artifacts: list[Artifact]


class ProjectedJob(Protocol):
    """What a projector may know of its job."""

    id: str
    user_id: str
    job_type: str
    target_type: str
    target_id: str
    root_id: str
    attempt_no: int


class ResultProjector(Protocol):
    """Writes business rows inside the caller's transaction, which it neither commits nor rolls back."""

    key: str
    """Unique name, for a definition's `projector`."""

    def project(self, session: Session, job: ProjectedJob, validated_output: Mapping[str, Any]) -> ProjectionResult:
        """Write the rows and return their references; the existing ones if the job was projected before."""
        ...
