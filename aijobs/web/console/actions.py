"""Which action goes with which state and right: one table for rows, pages and what a POST is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flask_babel import gettext
from flask_babel import lazy_gettext as _l

from aijobs.jobs.status import CANCELLED, FAILED


@dataclass(frozen=True)
class Action:
    """Something an operator may do to a job."""

    name: str
    label: Any
    right: str
    phases: frozenset[str]
    not_now: Any
    """Why it can't be done in any other phase."""


RETRY = Action(
    "retry",
    _l("Retry"),
    "retry",
    frozenset({FAILED, CANCELLED}),
    _l("Only a failed or cancelled job can be retried."),
)
CANCEL = Action(
    "cancel",
    _l("Cancel"),
    "cancel",
    frozenset({"created", "queued", "running", "retrying"}),
    _l("Only a job that has not ended can be cancelled."),
)
ACTIONS: Mapping[str, Action] = {action.name: action for action in (RETRY, CANCEL)}


@dataclass(frozen=True)
class Offer:
    """An action as it stands for one job and operator; `refused` says why it can't be done, None that it can."""

    action: Action
    refused: str | None


def offer(
    action: Action,
    *,
    phase: str,
    may: bool,
    retried_as: str | None = None,
    cancellable: bool = True,
    known_type: bool = True,
) -> Offer:
    """Whether `action` can be done, and if not, why: the right first, then the state, then the job's own reasons."""
    refused: str | None = None
    if not may:
        refused = gettext("Your role does not allow this.")
    elif phase == "cancel_requested" and action is CANCEL:
        refused = gettext("The cancel is on its way.")
    elif phase not in action.phases:
        refused = str(action.not_now)
    elif action is RETRY and retried_as:
        refused = gettext("It was retried already; the newest job of the chain counts.")
    elif action is RETRY and not known_type:
        refused = gettext("No such job type is installed.")
    elif action is CANCEL and not cancellable:
        refused = gettext("This type of job cannot be cancelled.")
    return Offer(action, refused)
