"""The ledger of provider calls: a row before each call, closed after it by whoever opened it.

Usage alone isn't fenced by the lease: whoever holds the job by then, the money is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import and_, bindparam, func, select, update
from sqlalchemy.orm import Session

from aijobs.ai.models import AiUsageLog, CallState
from aijobs.db.clock import Clock
from aijobs.db.database import Unit
from aijobs.db.statements import change_by, change_rows, insert_row, read_rows
from aijobs.ids import new_id

_LAST_CALL = select(func.max(AiUsageLog.call_no)).where(
    AiUsageLog.job_id == bindparam("of_job"), AiUsageLog.attempt_no == bindparam("of_attempt")
)
_UNDONE = and_(AiUsageLog.id == bindparam("of_id"), AiUsageLog.state != CallState.DONE)
MAX_PROVIDER, MAX_MODEL, MAX_REASON, MAX_REQUEST_ID = 64, 128, 32, 128
"""Characters that the columns hold."""


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
    http_status: int | None = None
    request_id: str | None = None


class PayingJob(Protocol):
    """The fields of a job that a usage row copies."""

    id: str
    user_id: str
    attempt_no: int
    credential_mode: str


class UsageLog:
    """Opens and closes usage rows in the session it is given."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def open(
        self,
        unit: Unit,
        job: PayingJob,
        provider: str,
        model: str,
        usage_id: str | None = None,
        *,
        prompt_estimate: int | None = None,
        credential_mode: str | None = None,
    ) -> str:
        """Add the row of the attempt's next call, under `usage_id` (a new one); its id.

        `credential_mode`: whose key pays for this call, where that isn't the job's.

        `prompt_estimate`: tokens that the prompt most likely has. They stand until the row is closed, and for good
        where nobody lives to close it, so that a lost call counts something against a quota.
        """
        usage_id = usage_id or new_id()
        last = read_rows(unit, _LAST_CALL, {"of_job": job.id, "of_attempt": job.attempt_no}).scalar()
        insert_row(
            unit,
            AiUsageLog,
            id=usage_id,
            job_id=job.id,
            attempt_no=job.attempt_no,
            call_no=(last or 0) + 1,
            user_id=job.user_id,
            state=CallState.STARTED,
            provider=provider[:MAX_PROVIDER],
            model=model[:MAX_MODEL],
            credential_mode=credential_mode or job.credential_mode,
            prompt_tokens=prompt_estimate,
            estimated=prompt_estimate is not None,
            billed="unknown",
            started_at=self._clock.now(),
        )
        return usage_id

    def find(self, session: Session, usage_id: str) -> str | None:
        """`usage_id` where its row is there: for a COMMIT whose answer was lost."""
        return session.execute(select(AiUsageLog.id).where(AiUsageLog.id == usage_id)).scalar()

    def close(self, unit: Unit, usage_id: str, result: CallResult) -> None:
        """Write what the call came to, also where the row was given up as lost meanwhile, or where the attempt was
        ended while the call went on: its answer may still come, and tells what it cost.

        Where nobody knows whether the call was billed, nor how long its prompt was, the estimate made before it stays.
        """
        state = CallState.FAILED if result.error_code else CallState.DONE
        values = {"state": state, "finished_at": self._clock.now(), **_storable(result)}
        change_by(unit, AiUsageLog, _UNDONE, of={"of_id": usage_id}, **values)


def _storable(result: CallResult) -> dict[str, Any]:
    """The columns of a result, cut to what they hold: a provider's odd words must not lose an answer that is paid."""
    values = dict(vars(result))
    if result.prompt_tokens is None and result.billed == "unknown":
        del values["prompt_tokens"]
        if not result.estimated:
            del values["estimated"]
    values["provider"], values["model"] = result.provider[:MAX_PROVIDER], result.model[:MAX_MODEL]
    values["finish_reason"] = result.finish_reason[:MAX_REASON] if result.finish_reason else None
    values["request_id"] = result.request_id[:MAX_REQUEST_ID] if result.request_id else None
    return values


def mark_lost(session: Session, clock: Clock, job_id: str, attempt_no: int) -> None:
    """Give up the open rows of an attempt whose worker is gone: it may have been billed, nobody knows.

    Their estimated prompts stay, the least that was spent if it was.
    """
    change_rows(
        session,
        update(AiUsageLog)
        .where(AiUsageLog.job_id == job_id, AiUsageLog.attempt_no == attempt_no, AiUsageLog.state == CallState.STARTED)
        .values(state=CallState.LOST, billed="unknown", finished_at=clock.now()),
    )
