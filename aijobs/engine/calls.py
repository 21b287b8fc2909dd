"""The usage rows of an attempt's provider calls: opened before each request leaves, closed with its result.

Usage isn't fenced by the lease: the money is spent, whichever attempt holds the job by then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from aijobs.ai.billing.cost import Cost, CostCalculator
from aijobs.ai.billing.tokens import read_count
from aijobs.ai.billing.usage import CallResult, UsageLog
from aijobs.ai.provider import CallFacts, CallFailed, GenerateAnswer, Route
from aijobs.clock import utc_now
from aijobs.db.database import Database, Unit
from aijobs.engine.run import OpenCall, Run
from aijobs.errors import JobError
from aijobs.ids import new_id
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.logs import get_logger

logger = get_logger(__name__)

_Counts = tuple[int | None, int | None, int | None]


@dataclass(frozen=True)
class CallBooks:
    """What the ledgers of all attempts share."""

    database: Database
    lifecycle: LifecycleRepository
    usage: UsageLog
    costs: CostCalculator

    def close(self, unit: Unit, run: Run) -> None:
        """Close the row of the attempt's last call, if one is open, in the caller's transaction."""
        if run.call is not None:
            self.usage.close(unit, run.call.usage_id, run.call.result)

    def close_now(self, run: Run) -> None:
        """Close the row of the attempt's last call, if one is open, in a transaction of its own."""
        if run.call is not None:
            self.database.transact(lambda connection: self.close(connection, run))
            run.call = None

    def cost(self, provider: str, model: str, counts: _Counts, at: datetime) -> Cost | None:
        """Return what a call at `at` cost; None if the price or a count is unknown."""
        prompt, completion, cached = counts
        if prompt is None or completion is None or cached is None:
            return None
        return self.costs.cost(
            provider, model, prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached, at=at
        )


class AttemptLedger:
    """The gateway's `CallLedger` for one request of an attempt, on all its routes.

    The last call stays open in `run.call`. The transaction that saves the answer or records the error closes it.
    """

    def __init__(self, books: CallBooks, run: Run, prompt_estimate: int, credential_mode: str | None = None) -> None:
        """`prompt_estimate`: tokens of the prompt, for the row of a call whose worker is lost. `credential_mode`: whose
        key pays, if it isn't the job's.
        """
        self._books, self._run = books, run
        self._prompt_estimate, self._credential_mode = prompt_estimate, credential_mode

    def opened(self, route: Route) -> None:
        """Open the row and add to the history, before the request leaves. Close the row of the call before it."""
        books, run = self._books, self._run
        usage_id = new_id()

        def open_row(connection: Connection) -> str:
            books.lifecycle.note_provider_call(connection, run.lease)
            books.close(connection, run)
            return books.usage.open(
                connection,
                run.job,
                route.provider,
                route.model,
                usage_id,
                prompt_estimate=self._prompt_estimate,
                credential_mode=self._credential_mode,
            )

        books.database.transact(open_row, confirm=lambda s: books.usage.find(s, usage_id))
        run.call = OpenCall(usage_id, CallResult(route.provider, route.model), utc_now())
        logger.info("provider.called", provider=route.provider, model=route.model, **run.fields())

    def failed(self, error: JobError) -> None:
        """Keep the result of a call that failed, until its row is closed."""
        call = self._run.call
        if call is None:
            return
        facts = error.facts if isinstance(error, CallFailed) else CallFacts()
        counts, priced = _counts(facts), facts.billed != "no"
        cost = self._books.cost(call.result.provider, call.result.model, counts, call.at) if priced else None
        call.result = replace(
            call.result,
            **_columns(counts, cost),
            estimated=facts.estimated,
            billed=facts.billed,
            latency_ms=call.watch.ms,
            finish_reason=facts.finish_reason,
            error_code=error.code,
            http_status=facts.http_status,
            request_id=facts.request_id,
        )

    def answered(self, answer: GenerateAnswer) -> None:
        """Keep what an answer cost, until its row is closed."""
        call = self._run.call
        if call is None:
            return
        counts = _counts(answer)
        cost = self._books.cost(answer.provider, answer.model, counts, call.at)
        if cost is None:
            logger.warning("usage.no_price", provider=answer.provider, model=answer.model)
        call.result = CallResult(
            provider=answer.provider,
            model=answer.model,
            **_columns(counts, cost),
            estimated=answer.estimated,
            billed="yes",
            latency_ms=call.watch.ms,
            finish_reason=answer.finish_reason,
            http_status=answer.http_status,
            request_id=answer.request_id,
        )

    def judged(self) -> None:
        """Close the row of a moderation that answered, at once: its finding may fail the job, but the call succeeded.

        Its server counts no tokens, so they are estimated.
        """
        call = self._run.call
        if call is None:
            return
        counts = (self._prompt_estimate, 0, 0)
        cost = self._books.cost(call.result.provider, call.result.model, counts, call.at)
        call.result = replace(
            call.result, **_columns(counts, cost), estimated=True, billed="yes", latency_ms=call.watch.ms
        )
        self._books.close_now(self._run)


def _counts(reported: GenerateAnswer | CallFacts) -> _Counts:
    """Prompt, completion and cached tokens as a provider counted them; None for each that can't be true.

    An answer is paid for whatever its counts say, and must not be lost to them.
    """
    counts = (reported.prompt_tokens, reported.completion_tokens, reported.cached_tokens)
    prompt, completion, cached = map(read_count, counts)
    if prompt is not None and cached is not None and cached > prompt:
        cached = None
    return prompt, completion, cached


def _columns(counts: _Counts, cost: Cost | None) -> dict[str, Any]:
    """Return counts and cost as columns of a usage row."""
    prompt, completion, cached = counts
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cached_tokens": cached,
        "cost_micros": cost.micro_units if cost else None,
        "currency": cost.currency if cost else None,
        "price_version": cost.price_version if cost else None,
    }
