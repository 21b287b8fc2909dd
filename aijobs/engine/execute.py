"""Stage 3, EXECUTE: ask the provider, read and check the answer, and save it before anything else is done with it.

No database session is open while a provider is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy.orm import Session

from aijobs.ai.cost import Cost, CostCalculator
from aijobs.ai.gateway import AiGateway
from aijobs.ai.items import schema_faults
from aijobs.ai.output import read_answer
from aijobs.ai.provider import CallFacts, CallFailed, GenerateAnswer, GenerateRequest, Moderator, Route
from aijobs.ai.safety import texts_of
from aijobs.ai.tokens import estimate_tokens
from aijobs.ai.usage import CallResult, UsageLog
from aijobs.canonical import canonical_hash, find_faults
from aijobs.clock import utc_now
from aijobs.db import Database
from aijobs.definitions.definition import JobDefinition
from aijobs.engine.guard import Guard
from aijobs.engine.resolve import Resolved
from aijobs.engine.run import OpenCall, Run
from aijobs.errors import JobError
from aijobs.ids import new_id
from aijobs.jobs.changes import saved
from aijobs.jobs.lifecycle import LifecycleRepository
from aijobs.jobs.models import AiJob
from aijobs.logs import get_logger
from aijobs.validation import find_schema_faults, plain_location, plain_path

logger = get_logger(__name__)

MAX_TOKENS = 2**31 - 1
"""What a column of the ledger holds, and more than any model reads."""

_Counts = tuple[int | None, int | None, int | None]


class Execute:
    """Turns an attempt's input into a validated output."""

    def __init__(
        self,
        database: Database,
        lifecycle: LifecycleRepository,
        gateway: AiGateway,
        usage: UsageLog,
        costs: CostCalculator,
        guard: Guard,
        moderator: Moderator | None = None,
    ) -> None:
        """`moderator`: a provider that judges content too, where the operator has one."""
        self._moderator = moderator
        self._database, self._lifecycle, self._gateway = database, lifecycle, gateway
        self._usage, self._costs, self._guard = usage, costs, guard

    def execute(self, run: Run, resolved: Resolved) -> None:
        """Leave the validated output on the job, or in `run.output` where no provider was paid for it.

        `JobError` with the code of what went wrong; the usage row of a call stays open in `run.call`, for the
        transaction that records the error to close.
        """
        run.token.raise_if_cancelled()
        self._guard.check_input(run, resolved.input)
        self._moderate(run, texts_of(resolved.input, identifiers=False), "input")
        if resolved.request is None:
            run.output = self._let_out(run, self._scripted(run, resolved.input))
            return
        text, finish_reason = self._ask(run, resolved.request, resolved.routes)
        output = _validated(run, resolved.input, read_answer(text, finish_reason))
        self._save(run, self._let_out(run, output))

    def _let_out(self, run: Run, output: dict[str, Any]) -> dict[str, Any]:
        self._guard.check_output(run, output)
        self._moderate(run, texts_of(output, identifiers=True), "output")
        return self._guard.redact_output(run, output)

    def _scripted(self, run: Run, job_input: Mapping[str, Any]) -> dict[str, Any]:
        if run.definition.script is None:
            raise TypeError(f"{run.definition.job_type} has neither prompt nor script")
        answer = run.definition.script(job_input, run.claim.attempt_no, run.token)
        run.token.raise_if_cancelled()
        return _validated(run, job_input, answer)

    def _moderate(self, run: Run, texts: Iterable[str], of: str) -> None:
        """Have a provider judge the texts as well: a call like any other, with its row. `JobError` CONTENT_SAFETY_…

        Where it doesn't answer the attempt has failed: who asked for the check would believe it done.
        """
        if self._moderator is None or not run.definition.security.content_safety_check:
            return
        asked = list(dict.fromkeys(text for text in texts if text.strip()))
        self.open_call(run, self._moderator.moderation_route)
        call = run.call
        try:
            found = self._moderator.moderate(asked, run.token)
        except JobError as error:
            self.fail_call(run, error)
            raise
        if call is not None:
            self._close_moderation(call, sum(estimate_tokens(text) for text in asked))
            run.call = None
        self._guard.judge(run, found, of)

    def _close_moderation(self, call: OpenCall, tokens: int) -> None:
        counts = (tokens, 0, 0)
        cost = self._cost(call.result.provider, call.result.model, counts, call.at)
        result = replace(call.result, **_told(counts, cost), estimated=True, billed="yes", latency_ms=call.watch.ms)
        self._database.write(lambda session: self._usage.close(session, call.usage_id, result))

    def _ask(self, run: Run, request: GenerateRequest, routes: Sequence[Route]) -> tuple[str, str]:
        answer = self._gateway.generate(request, routes, run.token, _Ledger(self, run))
        if run.call is not None:
            run.call.result = self._priced(answer, run.call)
        run.token.raise_if_cancelled()
        return answer.text, answer.finish_reason

    def open_call(self, run: Run, route: Route) -> None:
        """Open the usage row and tell the history, before the request leaves; the row of the attempt's call before it,
        which failed, is closed with it.
        """
        usage_id, before = new_id(), run.call

        def open_row(session: Session) -> str:
            job = self._lifecycle.note_provider_call(session, run.claim)
            if before is not None:
                self._usage.close(session, before.usage_id, before.result)
            return self._usage.open(session, job, route.provider, route.model, usage_id)

        self._database.write(open_row, settle=lambda s: self._usage.find(s, usage_id))
        run.call = OpenCall(usage_id, CallResult(route.provider, route.model), utc_now())
        logger.info("provider.called", provider=route.provider, model=route.model, **run.fields())

    def fail_call(self, run: Run, error: JobError) -> None:
        """Note what a call that gave no answer came to, for whoever closes its row."""
        call = run.call
        if call is None:
            return
        facts = error.facts if isinstance(error, CallFailed) else CallFacts()
        counts = _counts(facts)
        cost = self._cost(call.result.provider, call.result.model, counts, call.at) if facts.billed != "no" else None
        call.result = replace(
            call.result,
            **_told(counts, cost),
            estimated=facts.estimated,
            billed=facts.billed,
            latency_ms=call.watch.ms,
            finish_reason=facts.finish_reason,
            error_code=error.code,
            http_status=facts.http_status,
            request_id=facts.request_id,
        )

    def _priced(self, answer: GenerateAnswer, call: OpenCall) -> CallResult:
        counts = _counts(answer)
        cost = self._cost(answer.provider, answer.model, counts, call.at)
        if cost is None:
            logger.warning("usage.no_price", provider=answer.provider, model=answer.model)
        return CallResult(
            provider=answer.provider,
            model=answer.model,
            **_told(counts, cost),
            estimated=answer.estimated,
            billed="yes",
            latency_ms=call.watch.ms,
            finish_reason=answer.finish_reason,
            http_status=answer.http_status,
            request_id=answer.request_id,
        )

    def _cost(self, provider: str, model: str, counts: _Counts, at: datetime) -> Cost | None:
        """What a call at `at` cost; None where no price is known, or no count can be believed."""
        prompt, completion, cached = counts
        if prompt is None or completion is None or cached is None:
            return None
        return self._costs.cost(
            provider, model, prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached, at=at
        )

    def _save(self, run: Run, output: dict[str, Any]) -> None:
        call = run.call

        def save(session: Session) -> AiJob:
            job = self._lifecycle.save_output(run.claim, output, session)
            if call is not None:
                self._usage.close(session, call.usage_id, call.result)
            return job

        self._database.write(save, settle=saved(run.claim, canonical_hash(output)))
        run.call = None
        logger.info("job.output_saved", **run.fields())


class _Ledger:
    """The gateway's book of calls, kept by EXECUTE for one attempt."""

    def __init__(self, execute: Execute, run: Run) -> None:
        self._execute, self._run = execute, run

    def opened(self, route: Route) -> None:
        self._execute.open_call(self._run, route)

    def failed(self, error: JobError) -> None:
        self._execute.fail_call(self._run, error)


def _counts(told: GenerateAnswer | CallFacts) -> _Counts:
    """Prompt, completion and cached tokens as a provider counted them; None for each that can't be true.

    An answer is paid for whatever its counts say, and must not be lost to them.
    """
    counts = (told.prompt_tokens, told.completion_tokens, told.cached_tokens)
    prompt, completion, cached = (n if isinstance(n, int) and 0 <= n <= MAX_TOKENS else None for n in counts)
    if prompt is not None and cached is not None and cached > prompt:
        cached = None
    return prompt, completion, cached


def _told(counts: _Counts, cost: Cost | None) -> dict[str, Any]:
    """Counts and cost as a usage row has them."""
    prompt, completion, cached = counts
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cached_tokens": cached,
        "cost_micros": cost.micro_units if cost else None,
        "currency": cost.currency if cost else None,
        "price_version": cost.price_version if cost else None,
    }


def _validated(run: Run, job_input: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer after the output's schema and the definition's own check; `JobError` VALIDATION_… naming faults."""
    definition: JobDefinition = run.definition
    if faults := [(plain_path(path), fault) for path, fault in find_faults(answer)]:
        raise schema_faults(faults)
    try:
        model = definition.output.schema.model_validate(dict(answer))
    except ValidationError as error:
        # Without the input, which is the model's answer and belongs in no log and no message.
        named = [(plain_location(place), fault) for place, fault in find_schema_faults(error)]
        raise schema_faults(named) from None
    output: dict[str, Any] = model.model_dump(mode="json", by_alias=True)
    if definition.output.validator is not None:
        output = definition.output.validator(job_input, output, run.job.id)
    return output
