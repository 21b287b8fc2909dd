"""A job type that keeps books of its own, which the engine knows nothing of; brought in as a plug-in would be.

In: a number and how long to take. Out: the number. Leaves: a row in a table without any unique index, so that a
result that came twice would be there twice, and a line in a file at the start and at the end of each run of its code.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Column, Integer, MetaData, Table, func, insert, select
from sqlalchemy.orm import Session

from aijobs.db.database import TABLE_OPTIONS, Database, Key
from aijobs.definitions import definition as d
from aijobs.definitions.projector import Artifact, ProjectedJob, ProjectionResult
from aijobs.ids import new_id

JOB_TYPE = "bench"
LEDGER = "BENCH_LEDGER"
"""The variable that names the file."""
STARTED, ENDED = "started", "ended"

METADATA = MetaData()
RESULTS = Table(
    "bench_results",
    METADATA,
    Column("id", Key(36), primary_key=True),
    Column("job_id", Key(36), nullable=False),
    Column("attempt_no", Integer, nullable=False),
    **cast("dict[str, Any]", TABLE_OPTIONS),
)
_INSERT = insert(RESULTS)


class Task(BaseModel):
    """What one job does."""

    model_config = ConfigDict(extra="forbid", strict=True)

    number: int = Field(ge=0)
    sleep_ms: int = Field(ge=0, le=60_000)


class Answer(BaseModel):
    """What comes of it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    number: int


@dataclass(frozen=True)
class Entry:
    """A line of the file: one run of the code, at its start or its end."""

    what: str
    number: int
    attempt_no: int
    pid: int
    at: float


def _note(what: str, number: int, attempt_no: int) -> None:
    line = {"what": what, "number": number, "attempt_no": attempt_no, "pid": os.getpid(), "at": time.time()}
    os.write(_ledger(os.environ[LEDGER]), (json.dumps(line) + "\n").encode())


@cache
def _ledger(path: str) -> int:
    """The file, kept open: one write a line, whole also where another process writes."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def read_ledger(path: Path) -> list[Entry]:
    """All lines so far."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]  # The last line may be on its way.
    return [Entry(**json.loads(line)) for line in whole.splitlines()]


def count_results(database: Database) -> Counter[str]:
    """How many results each job has."""
    with database.read() as session:
        rows = [
            tuple(row) for row in session.execute(select(RESULTS.c.job_id, func.count()).group_by(RESULTS.c.job_id))
        ]
    return Counter(dict(rows))


def run(job_input: Mapping[str, Any], attempt_no: int, context: d.ScriptContext) -> dict[str, Any]:
    """Take the time. It sleeps as a call to a provider that can't be aborted would."""
    number = job_input["number"]
    _note(STARTED, number, attempt_no)
    time.sleep(job_input["sleep_ms"] / 1000)
    _note(ENDED, number, attempt_no)
    return {"number": number}


class BenchProjector:
    """One more row each time: nothing but the engine keeps it from coming twice."""

    key = "bench"

    def project(self, session: Session, job: ProjectedJob, validated_output: Mapping[str, Any]) -> ProjectionResult:
        row_id = new_id()
        session.execute(_INSERT, {"id": row_id, "job_id": job.id, "attempt_no": job.attempt_no})
        return ProjectionResult([Artifact("BenchResult", row_id, 0)])


PROJECTOR = BenchProjector()

DEFINITION = d.JobDefinition(
    job_type=JOB_TYPE,
    metadata=d.Metadata(label="Bench", description="Takes its time.", domain="maintenance", version="1"),
    queue=d.Queue("ai-interactive", 50),
    execution=d.Execution(timeout_ms=60_000, max_retries=2, retry_backoff=d.RetryBackoff(1000)),
    input=d.Input("1", Task),
    output=d.Output("1", Answer),
    projector="bench",
    script=run,
    production=False,
)
