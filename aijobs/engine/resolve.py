"""Stage 2, RESOLVE: the snapshot, the credential, the prompt and the route of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aijobs.ai.prompts import PromptTemplates
from aijobs.ai.provider import GenerateRequest
from aijobs.ai.router import ModelRouter
from aijobs.db import Database
from aijobs.definitions.definition import PLATFORM_KEY
from aijobs.engine.run import Run
from aijobs.errors import JobError
from aijobs.jobs.snapshots import read_snapshot


@dataclass(frozen=True)
class Resolved:
    """What the work needs: the input, and the request for a provider where the type asks one."""

    input: Mapping[str, Any] = field(repr=False)
    request: GenerateRequest | None = field(repr=False)


class Resolve:
    """Gathers what an attempt works on."""

    def __init__(self, database: Database, prompts: PromptTemplates, router: ModelRouter) -> None:
        self._database, self._prompts, self._router = database, prompts, router

    def resolve(self, run: Run) -> Resolved:
        """The attempt's input and request. `JobError` INTERNAL_SNAPSHOT_MISSING, CREDENTIAL_NOT_FOUND or CONFIG."""
        job, definition = run.job, run.definition
        if job.credential_mode != PLATFORM_KEY and job.credential_id is None:
            raise JobError("CREDENTIAL_NOT_FOUND", "the credential was deleted")
        with self._database.read() as session:
            snapshot = read_snapshot(session, job.id)
        if snapshot is None:
            raise JobError("INTERNAL_SNAPSHOT_MISSING", "the job has no snapshot")
        content: Mapping[str, Any] = snapshot.content
        if definition.prompt is None:
            return Resolved(content, None)
        schema = definition.output.schema.model_json_schema()
        prompt = self._prompts.render(
            definition.prompt.name,
            job.prompt_version or definition.prompt.version,
            {
                "input": content,
                "output_schema": json.dumps(schema, ensure_ascii=False),
                "faults": job.answer_faults or (),
            },
        )
        route = self._router.route(definition, job.credential_mode)
        return Resolved(content, GenerateRequest(job.job_type, route, prompt, content, schema))
