"""The ledger of provider calls: a row before each call, closed after it by whoever opened it.

Usage alone isn't fenced by the lease: whoever holds the job by then, the money is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from aijobs.ai.models import DONE, FAILED_CALL, LOST, STARTED, AiUsageLog
from aijobs.db import Clock, change_rows
from aijobs.jobs.models import AiJob


@dataclass(frozen=True)
class CallResult:
    """What a finished provider call cost. Tokens and cost are None where they are not known."""

    provider: str
    model: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    estimated: bool = False
    cost_micros: int | None = None
    currency: str | None = None
    price_version: str | None = None
    billed: str = "unknown"
    latency_ms: int | None = None
    finish_reason: str | None = None
    error_code: str | None = None


class UsageLog:
    """Opens and closes usage rows in the session it is given."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def open(self, session: Session, job: AiJob, provider: str, model: str) -> str:
        """Add the row of the attempt's next call; its id."""
        last = session.execute(
            select(func.max(AiUsageLog.call_no)).where(
                AiUsageLog.job_id == job.id, AiUsageLog.attempt_no == job.attempt_no
            )
        ).scalar()
        row = AiUsageLog(
            job_id=job.id,
            attempt_no=job.attempt_no,
            call_no=(last or 0) + 1,
            user_id=job.user_id,
            state=STARTED,
            provider=provider,
            model=model,
            credential_mode=job.credential_mode,
            billed="unknown",
            started_at=self._clock.now(),
        )
        session.add(row)
        session.flush()
        return row.id

    def close(self, session: Session, usage_id: str, result: CallResult) -> None:
        """Write what the call came to, also where the row was given up as lost meanwhile, or where the attempt was
        ended while the call went on: its answer may still come, and tells what it cost.
        """
        change_rows(
            session,
            update(AiUsageLog)
            .where(AiUsageLog.id == usage_id, AiUsageLog.state != DONE)
            .values(
                state=FAILED_CALL if result.error_code else DONE,
                finished_at=self._clock.now(),
                **vars(result),
            ),
        )


def mark_lost(session: Session, clock: Clock, job_id: str, attempt_no: int) -> None:
    """Give up the open rows of an attempt whose worker is gone: it may have been billed, nobody knows."""
    change_rows(
        session,
        update(AiUsageLog)
        .where(AiUsageLog.job_id == job_id, AiUsageLog.attempt_no == attempt_no, AiUsageLog.state == STARTED)
        .values(state=LOST, billed="unknown", finished_at=clock.now()),
    )
