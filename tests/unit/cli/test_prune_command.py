"""`aijobs prune`: it reports deleted rows and failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import text, update

from aijobs.cli.opening import open_services
from aijobs.clock import utc_now
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreateJobInput

Aijobs = Callable[..., tuple[int, str, str]]


def test_prune_fails_if_a_chain_could_not_be_deleted(upgraded: Aijobs, aijobs: Aijobs) -> None:
    request = CreateJobInput("ann", "synthetic", "script", "one", {"calls": [{"output": {}}]})
    with open_services() as services:
        held, gone = (services.jobs.create_job(request).job.id for _ in range(2))
        for job_id in (held, gone):
            services.jobs.cancel(job_id, "user:ann")
        with services.database.transaction() as session:
            session.execute(update(AiJob).values(finished_at=utc_now() - timedelta(days=1000)))
            session.execute(text("CREATE TABLE plug_in (job_id VARCHAR(36) REFERENCES ai_jobs (id))"))
            session.execute(text("INSERT INTO plug_in VALUES (:held)"), {"held": held})
        code, out, _ = aijobs("prune")
        assert (code, out) == (
            1,
            "deleted 1 jobs, 0 tombstones and 0 sessions; 1 old chains could not be deleted, the log says why\n",
        )
        with services.database.transaction() as session:
            session.execute(text("DROP TABLE plug_in"))
        code, out, _ = aijobs("prune", "--json")
        assert (code, json.loads(out)) == (0, {"jobs": 1, "tombstones": 0, "failed": 0, "sessions": 0})
        assert aijobs("prune") == (0, "deleted 0 jobs, 0 tombstones and 0 sessions\n", "")
