"""What provider calls used and cost, by day and job type."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from aijobs.ai.models import FAILED_CALL, LOST, AiUsageLog
from aijobs.jobs.models import AiJob
from aijobs.monitor.views import UsageDay

MOST_ROWS = 5000


def find_usage_days(session: Session, since: datetime, until: datetime) -> list[UsageDay]:
    """Totals of calls begun from `since` until before `until`, newest day first, in one statement.

    Calls of another currency are another row, and unpriced ones are counted, never taken for free.
    """
    day = func.date(AiUsageLog.started_at)
    rows = session.execute(
        select(
            day,
            AiJob.job_type,
            AiUsageLog.currency,
            func.count(),
            func.sum(case((AiUsageLog.state.in_((FAILED_CALL, LOST)), 1), else_=0)),
            func.coalesce(func.sum(AiUsageLog.prompt_tokens), 0),
            func.coalesce(func.sum(AiUsageLog.completion_tokens), 0),
            func.sum(AiUsageLog.cost_micros),
            func.count() - func.count(AiUsageLog.cost_micros),
        )
        .join(AiJob, AiJob.id == AiUsageLog.job_id)
        .where(AiUsageLog.started_at >= since, AiUsageLog.started_at < until)
        .group_by(day, AiJob.job_type, AiUsageLog.currency)
        .order_by(day.desc(), AiJob.job_type, AiUsageLog.currency)
        .limit(MOST_ROWS)
    )
    return [
        UsageDay(
            day=str(d),
            job_type=job_type,
            currency=currency,
            calls=calls,
            failed_calls=int(failed),
            prompt_tokens=int(prompt),
            completion_tokens=int(completion),
            cost_micros=None if cost is None else int(cost),
            unpriced_calls=int(unpriced),
        )
        for d, job_type, currency, calls, failed, prompt, completion, cost, unpriced in rows
    ]
