"""Stage 2, RESOLVE: the snapshot, the credential, the prompt and the routes to a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session

from aijobs.ai.calling.router import ModelRouter
from aijobs.ai.prompts import PromptTemplates
from aijobs.ai.provider import GenerateRequest, Route
from aijobs.credentials.service import CredentialService
from aijobs.credentials.vault import SealedKey
from aijobs.db.database import Database
from aijobs.definitions.definition import PLATFORM_KEY
from aijobs.engine.retry import count_retries
from aijobs.engine.run import Run
from aijobs.errors import JobError
from aijobs.jobs.lease import HeldJob

MOST_OUTPUT_TOKENS = 64_000
"""Upper limit for the doubled token budget after a truncated answer. Beyond it the prompt asks for fewer items."""


@dataclass(frozen=True)
class Resolved:
    """The input, and the request for a provider with its routes, if the job type calls one."""

    input: Mapping[str, Any] = field(repr=False)
    request: GenerateRequest | None = field(repr=False)
    routes: tuple[Route, ...] = ()


@dataclass(frozen=True)
class _Known:
    """What the database holds beside the job."""

    credential: SealedKey | None
    retries: Counter[str]


class Resolve:
    """Gathers what EXECUTE needs."""

    def __init__(
        self, database: Database, prompts: PromptTemplates, router: ModelRouter, credentials: CredentialService
    ) -> None:
        self._database, self._prompts, self._router = database, prompts, router
        self._credentials = credentials

    def resolve(self, run: Run) -> Resolved | None:
        """Return the attempt's input and request; None if an output is saved already.

        `JobError` INTERNAL_SNAPSHOT_MISSING, CREDENTIAL_NOT_FOUND or CONFIG.
        """
        job, definition = run.job, run.definition
        if job.output_hash is not None:
            return None
        platform = job.credential_mode == PLATFORM_KEY
        if platform and not job.retry_count:
            known = _Known(None, Counter())
        else:
            known = self._database.query(lambda session: self._read(session, job))
        if not platform:
            if known.credential is None:
                raise JobError("CREDENTIAL_NOT_FOUND", "the credential was deleted")
            self._credentials.note_use(known.credential)
        if run.content is None:
            raise JobError("INTERNAL_SNAPSHOT_MISSING", "the job has no snapshot")
        content: Mapping[str, Any] = json.loads(run.content)
        if definition.prompt is None:
            return Resolved(content, None)
        schema = definition.output.schema.model_json_schema()
        prompt = self._prompts.render(
            definition.prompt.name,
            job.prompt_version or definition.prompt.version,
            {
                "input": content,
                "output_schema": json.dumps(schema, ensure_ascii=False),
                "faults": (*_shortened(known.retries), *(job.answer_faults or ())),
            },
        )
        routes = self._router.routes(definition, job.credential_mode)
        request = GenerateRequest(
            job_type=job.job_type,
            route=routes[0],
            prompt=prompt,
            input=content,
            output_schema=schema,
            max_output_tokens=_room(definition.max_output_tokens, known.retries["VALIDATION_TRUNCATED"]),
            constrained=known.retries["PROVIDER_EMPTY_OUTPUT"] == 0,
            credential=known.credential,
        )
        return Resolved(content, request, routes)

    def _read(self, session: Session, job: HeldJob) -> _Known:
        sealed = None if job.credential_mode == PLATFORM_KEY else self._credentials.find_sealed(session, job)
        return _Known(sealed, count_retries(session, job))


def _shortened(retries: Counter[str]) -> Iterator[str]:
    """Ask for half as many items after each answer that was too long.

    More tokens may not help, because providers have limits of their own: the same request would fail the same way.
    """
    too_long = retries["VALIDATION_TRUNCATED"] + retries["VALIDATION_OUTPUT_TOO_LARGE"]
    if too_long:
        yield f"your answers were too long: give at most 1/{2**too_long} of the items, and at least one"


def _room(tokens: int, truncations: int) -> int:
    """Return how many tokens an answer may have after so many truncated ones."""
    return max(tokens, min(tokens * 2**truncations, MOST_OUTPUT_TOKENS))
