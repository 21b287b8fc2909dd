"""The actions on jobs, with their rights and conditions: one table for rows, pages, keys and POST checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flask_babel import gettext
from flask_babel import lazy_gettext as _l

from aijobs.jobs.status import JobState, Phase
from aijobs.monitor.views import JobRow
from aijobs.operators import rights


@dataclass(frozen=True)
class Action:
    """An action of an operator on a job."""

    name: str
    label: Any
    right: str
    refusal: Callable[[JobRow], str | None]
    """Returns why the action isn't possible, as a key of `reasons`; None: it is."""
    reasons: Mapping[str, Any]


RETRY = Action(
    name="retry",
    label=_l("Retry"),
    right=rights.RETRY,
    refusal=lambda job: job.retry_refusal,
    reasons={
        "not_final": _l("The job has not ended yet. Only failed or cancelled jobs can be retried."),
        JobState.SUCCEEDED: _l("The job succeeded. Only failed or cancelled jobs can be retried."),
        "superseded": _l("The job was already retried. Only the newest job of a retry chain can be retried."),
        "unknown_job_type": _l("This job type is not installed."),
        "snapshot_expired": _l("Its input snapshot has expired and cannot be rebuilt."),
        "input_outdated": _l("Its input snapshot does not match the current schema of the job type."),
        "credential_gone": _l("The user's key for this job was deleted."),
    },
)
CANCEL = Action(
    name="cancel",
    label=_l("Cancel"),
    right=rights.CANCEL,
    refusal=lambda job: job.cancel_refusal,
    reasons={
        "final": _l("The job has already ended."),
        Phase.CANCEL_REQUESTED: _l("A cancel was already requested. The worker is stopping."),
        "not_cancellable": _l("This type of job cannot be cancelled."),
    },
)
ACTIONS: Mapping[str, Action] = {action.name: action for action in (RETRY, CANCEL)}


@dataclass(frozen=True)
class Offer:
    """An action for one job and operator. `refused`: why it isn't possible; None: it is."""

    action: Action
    refused: str | None


def offer(action: Action, job: JobRow, may: Callable[[str], bool]) -> Offer:
    """Return `action` with the reason why it isn't possible, if there is one. The right is checked before the job."""
    if not may(action.right):
        return Offer(action, gettext("Your role does not allow this."))
    return Offer(action, refusal_text(action, action.refusal(job)))


def refusal_text(action: Action, reason: str | None) -> str | None:
    """Return the text of a reason; None for None."""
    if reason is None:
        return None
    return str(action.reasons.get(reason, gettext("This is not possible now.")))
