"""The usage rows of provider calls: opened before each call, closed after it.

They aren't fenced by the lease: the money is spent, whichever attempt holds the job.
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
"""Maximum characters of the columns."""


@dataclass(frozen=True)
class CallResult:
    """The result of a finished provider call. Tokens and cost are None if unknown."""

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
    """Opens and closes usage rows in the caller's transaction."""

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
        """Add the row of the attempt's next call under `usage_id` (default: a new id), and return that id.

        `credential_mode`: whose key pays for this call, if it isn't the job's. `prompt_estimate`: estimated tokens of
        the prompt. They stand until the row is closed, and for good if nobody lives to close it, so that a lost call
        counts toward a quota.
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
        """Return `usage_id` if its row exists, to confirm a COMMIT whose answer was lost."""
        return session.execute(select(AiUsageLog.id).where(AiUsageLog.id == usage_id)).scalar()

    def close(self, unit: Unit, usage_id: str, result: CallResult) -> None:
        """Write the result of the call, even if its row was given up as lost, or if the attempt has ended: a late
        answer says what it cost.

        If it is unknown whether the call was billed and how long its prompt was, the estimate stays.
        """
        state = CallState.FAILED if result.error_code else CallState.DONE
        values = {"state": state, "finished_at": self._clock.now(), **_storable(result)}
        change_by(unit, AiUsageLog, _UNDONE, of={"of_id": usage_id}, **values)


def _storable(result: CallResult) -> dict[str, Any]:
    """Return the columns of a result, cut to their lengths: a provider's odd values must not lose a paid answer."""
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
    """Mark the open rows of an attempt as lost: its worker is gone, and whether the calls were billed is unknown.

    Their estimated prompts stay as the minimum that was spent.
    """
    change_rows(
        session,
        update(AiUsageLog)
        .where(AiUsageLog.job_id == job_id, AiUsageLog.attempt_no == attempt_no, AiUsageLog.state == CallState.STARTED)
        .values(state=CallState.LOST, billed="unknown", finished_at=clock.now()),
    )
