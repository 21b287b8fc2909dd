"""The rows of an attempt's provider calls: opened before each request leaves, closed with what it came to.

Usage isn't fenced by the lease: whoever holds the job by then, the money is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from aijobs.ai.billing.cost import Cost, CostCalculator
from aijobs.ai.billing.tokens import read_count
from aijobs.ai.billing.usage import CallResult, UsageLog
from aijobs.ai.provider import CallFacts, CallFailed, GenerateAnswer, Route
from aijobs.clock import utc_now
from aijobs.db.database import Database
from aijobs.engine.run import OpenCall, Run
from aijobs.errors import JobError
from aijobs.ids import new_id
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.logs import get_logger

logger = get_logger(__name__)

_Counts = tuple[int | None, int | None, int | None]


@dataclass(frozen=True)
class CallBooks:
    """What the ledgers of all attempts write with."""

    database: Database
    lifecycle: LifecycleRepository
    usage: UsageLog
    costs: CostCalculator

    def close(self, session: Session, run: Run) -> None:
        """Close the row of the attempt's last call, if one is open, in the caller's transaction."""
        if run.call is not None:
            self.usage.close(session, run.call.usage_id, run.call.result)

    def close_now(self, run: Run) -> None:
        """Close the row of the attempt's last call, if one is open, where nothing else is to be written with it."""
        if run.call is not None:
            self.database.write(lambda session: self.close(session, run))
            run.call = None

    def cost(self, provider: str, model: str, counts: _Counts, at: datetime) -> Cost | None:
        """What a call at `at` cost; None where no price is known, or no count can be believed."""
        prompt, completion, cached = counts
        if prompt is None or completion is None or cached is None:
            return None
        return self.costs.cost(
            provider, model, prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached, at=at
        )


class AttemptLedger:
    """The gateway's `CallLedger` for one thing that an attempt asks, on whichever routes it is asked.

    Its last call stays open in `run.call`, for the transaction that saves the answer or records the error to close.
    """

    def __init__(self, books: CallBooks, run: Run, prompt_estimate: int, credential_mode: str | None = None) -> None:
        """`prompt_estimate`: tokens of what is asked, which stand on the row of a call that nobody lives to close.
        `credential_mode`: whose key pays, where that isn't the job's.
        """
        self._books, self._run = books, run
        self._prompt_estimate, self._credential_mode = prompt_estimate, credential_mode

    def opened(self, route: Route) -> None:
        """Open the row and tell the history, before the request leaves; the row of the attempt's call before it is
        closed with it.
        """
        books, run = self._books, self._run
        usage_id = new_id()

        def open_row(session: Session) -> str:
            job = books.lifecycle.note_provider_call(session, run.lease)
            books.close(session, run)
            return books.usage.open(
                session,
                job,
                route.provider,
                route.model,
                usage_id,
                prompt_estimate=self._prompt_estimate,
                credential_mode=self._credential_mode,
            )

        books.database.write(open_row, confirm=lambda s: books.usage.find(s, usage_id))
        run.call = OpenCall(usage_id, CallResult(route.provider, route.model), utc_now())
        logger.info("provider.called", provider=route.provider, model=route.model, **run.fields())

    def failed(self, error: JobError) -> None:
        """Note what a call that gave no answer came to, for whoever closes its row."""
        call = self._run.call
        if call is None:
            return
        facts = error.facts if isinstance(error, CallFailed) else CallFacts()
        counts, priced = _counts(facts), facts.billed != "no"
        cost = self._books.cost(call.result.provider, call.result.model, counts, call.at) if priced else None
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

    def answered(self, answer: GenerateAnswer) -> None:
        """Note what an answer cost, for whoever closes its row."""
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
            **_told(counts, cost),
            estimated=answer.estimated,
            billed="yes",
            latency_ms=call.watch.ms,
            finish_reason=answer.finish_reason,
            http_status=answer.http_status,
            request_id=answer.request_id,
        )

    def judged(self) -> None:
        """Close the row of a moderation that answered; its server counts no tokens.

        At once: nothing of it is saved, and what it found may be what ends the job, which is no failure of the call.
        """
        call = self._run.call
        if call is None:
            return
        counts = (self._prompt_estimate, 0, 0)
        cost = self._books.cost(call.result.provider, call.result.model, counts, call.at)
        call.result = replace(
            call.result, **_told(counts, cost), estimated=True, billed="yes", latency_ms=call.watch.ms
        )
        self._books.close_now(self._run)


def _counts(told: GenerateAnswer | CallFacts) -> _Counts:
    """Prompt, completion and cached tokens as a provider counted them; None for each that can't be true.

    An answer is paid for whatever its counts say, and must not be lost to them.
    """
    counts = (told.prompt_tokens, told.completion_tokens, told.cached_tokens)
    prompt, completion, cached = map(read_count, counts)
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
