"""SQL conditions on jobs that several rooms need: which jobs wait, and since when they are due."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, exists, func, or_

from aijobs.db.statements import constant
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import JobState
from aijobs.outbox.models import QueuePause

FREED: ColumnElement[bool] = and_(AiJob.lifecycle_status == constant(JobState.RUNNING), AiJob.locked_by.is_(None))
"""The job was held, and waits for its next attempt. It always has a time for it."""
WAITS: ColumnElement[bool] = or_(AiJob.lifecycle_status == constant(JobState.QUEUED), FREED)
"""Nobody holds the job, and it is not final."""
DUE_AT = func.coalesce(AiJob.next_attempt_at, AiJob.created_at)
"""The due time of a job that waits."""
NO_CANCEL: ColumnElement[bool] = AiJob.cancel_requested_at.is_(None)
"""No cancel was requested."""
NO_SUSPECT: ColumnElement[bool] = AiJob.lost_count + AiJob.uncharged_losses == 0
"""The job has lost no worker."""
PAUSED: ColumnElement[bool] = exists().where(QueuePause.queue_name == AiJob.queue_name)
"""The job's queue is paused."""
