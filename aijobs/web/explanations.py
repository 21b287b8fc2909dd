"""Explain why a job failed or waits: what happened and what an operator can do, for each code and each wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flask_babel import lazy_gettext as _l

from aijobs.definitions.definition import MOST_LOSSES, QUEUES
from aijobs.jobs.history import HistoryType
from aijobs.monitor.views import JobDetail


class Explanation(NamedTuple):
    """What happened, and what to do about it."""

    what: Any
    advice: Any


_RETRY_LATER = _l("Retry when the provider is healthy again. Check other jobs with this code first.")
_RETRY_ONCE = _l("Retry once. If many jobs end like this, check the prompt and the model.")
_USER_MUST_FIX = _l("Only the user can fix this. A retry before that fails again.")
_FIX_CAUSE = _l("Check the internal message and the worker's log for this job id, fix the cause, then retry.")

FAILURES: Mapping[str, Explanation] = {
    "CANCELLED": Explanation(_l("The job was cancelled."), _l("Nothing to do. Retry it if the cancel was a mistake.")),
    "TIMEOUT": Explanation(
        _l("The attempt passed its deadline and was stopped."),
        _l("Retry. If it keeps happening, the input is too large for the time limit, or the provider is slow."),
    ),
    "PROVIDER_RATE_LIMITED": Explanation(_l("The provider's rate limit was exceeded."), _RETRY_LATER),
    "PROVIDER_UNAVAILABLE": Explanation(
        _l("The provider could not be reached, or answered with a server error."), _RETRY_LATER
    ),
    "PROVIDER_TIMEOUT": Explanation(_l("The provider did not answer in time."), _RETRY_LATER),
    "PROVIDER_STREAM_BROKEN": Explanation(_l("The provider's answer stopped before it was complete."), _RETRY_LATER),
    "PROVIDER_CONNECTION_LOST": Explanation(
        _l("The connection to the provider was lost; whether the call was billed is unknown."), _RETRY_LATER
    ),
    "PROVIDER_EMPTY_OUTPUT": Explanation(_l("The provider's answer was empty."), _RETRY_ONCE),
    "PROVIDER_ACCOUNT_EXHAUSTED": Explanation(
        _l("The platform's account with the provider has no balance left."),
        _l("Top up the account, then retry. Every job on the platform key fails until then."),
    ),
    "VALIDATION_OUTPUT_NOT_JSON": Explanation(_l("The answer was not JSON."), _RETRY_ONCE),
    "VALIDATION_OUTPUT_SCHEMA": Explanation(_l("The answer did not match the schema."), _RETRY_ONCE),
    "VALIDATION_OUTPUT_SEMANTICS": Explanation(
        _l("The answer matched the schema, but failed the checks of the job type."), _RETRY_ONCE
    ),
    "VALIDATION_OUTPUT_TOO_LARGE": Explanation(_l("The answer was larger than allowed."), _RETRY_ONCE),
    "VALIDATION_TRUNCATED": Explanation(_l("The answer was cut off at the model's length limit."), _RETRY_ONCE),
    "VALIDATION_INPUT_TOO_LARGE": Explanation(
        _l("The input is too long for the model."), _l("The user has to submit a shorter text. A retry fails again.")
    ),
    "VALIDATION_NOTHING_TO_EXTRACT": Explanation(
        _l("The input holds nothing to make items from."),
        _l("The user has to submit different material. A retry fails again."),
    ),
    "CONTENT_SAFETY_BLOCKED": Explanation(
        _l("The content safety check refused the input or the answer."), _l("A retry would be refused again.")
    ),
    "CONTENT_SAFETY_SELF_HARM": Explanation(
        _l("The input mentions self-harm. The user was shown where to find help."),
        _l("Somebody may be in danger: follow your school's or service's procedure."),
    ),
    "CONTENT_SAFETY_PROVIDER": Explanation(
        _l("The provider refused the input or stopped its own answer."),
        _l("A retry would most likely be refused again. Another provider may accept it."),
    ),
    "CREDENTIAL_INVALID": Explanation(_l("The provider refused the user's own key."), _USER_MUST_FIX),
    "CREDENTIAL_PLATFORM_INVALID": Explanation(
        _l("The provider refused the platform's own key."),
        _l("Set a key that works and restart the workers, then retry. Every job on the platform key fails until then."),
    ),
    "CREDENTIAL_NOT_FOUND": Explanation(_l("The user's key no longer exists."), _USER_MUST_FIX),
    "CREDENTIAL_UNREADABLE": Explanation(
        _l("The stored key of the user cannot be decrypted."),
        _l("Only this user's jobs fail. Check the internal message: AIJOBS_CREDENTIAL_KEYS may lack a key."),
    ),
    "CREDENTIAL_INSUFFICIENT_BALANCE": Explanation(
        _l("The account of the user's key has no balance left."), _USER_MUST_FIX
    ),
    "INTERNAL_ERROR": Explanation(_l("An internal error occurred in aijobs."), _FIX_CAUSE),
    "INTERNAL_PROJECTION": Explanation(
        _l("The answer was saved, but writing the business rows failed."),
        _l("Fix the cause, then retry: the saved answer is used again, and no provider is called."),
    ),
    "INTERNAL_DATABASE": Explanation(_l("The database failed while the job ran."), _FIX_CAUSE),
    "INTERNAL_CONFIG": Explanation(
        _l("A setting that this job needs is missing or wrong."),
        _l("Correct the setting, restart the workers, then retry."),
    ),
    "INTERNAL_SNAPSHOT_MISSING": Explanation(
        _l("The input snapshot of the job is missing."), _l("It cannot be retried. The user has to submit a new job.")
    ),
    "INTERNAL_WORKER_LOST": Explanation(
        _l("The processes that ran the job died too often."),
        _l("Check its input, and whether workers were killed (memory, deploys) at the times below. Then retry."),
    ),
    "INTERNAL_NOT_DISPATCHED": Explanation(
        _l("The job's message could not be sent to the broker."),
        _l("Check the outbox event's last error, fix the cause, then retry."),
    ),
    "INTERNAL_UNKNOWN_JOB_TYPE": Explanation(
        _l("No worker supports this job type."), _l("Deploy workers that support the type. This job cannot be retried.")
    ),
}

_RUNS_ALONE = _l(
    "Its worker process died while several jobs ran in it. It now runs alone in its own process, so that it cannot "
    "affect other jobs."
)


_BEGAN_ALONE = _l(
    "An earlier job of this retry chain lost its worker. This job therefore runs alone from the start, with one loss "
    "already counted."
)


class Losses(NamedTuple):
    """A job's lost workers by kind."""

    own: int
    most_own: int
    """The number of own losses at which it fails."""
    shared: int
    inherited: int
    """Losses of the job that it retries."""


def count_losses(detail: JobDetail) -> Losses:
    """Count the job's losses by kind."""
    job = detail.job
    lost = sum(entry.type == HistoryType.LEASE_LOST for entry in detail.history)
    inherited = max(0, job.lost_count + job.uncharged_losses - lost) if job.parent_job_id else 0
    most_own = QUEUES[job.queue_name].attempts + (1 if detail.output_hash else 0)
    return Losses(job.lost_count, most_own, job.uncharged_losses - inherited, inherited)


def explain_losses(detail: JobDetail) -> list[str]:
    """Return a sentence for each kind of loss; empty if there was no loss."""
    losses, sentences = count_losses(detail), list[str]()
    if losses.inherited:
        sentences.append(str(_BEGAN_ALONE))
    elif losses.shared and not detail.job.final:
        sentences.append(str(_RUNS_ALONE))
    if losses.own:
        own = _l("Losses of its own process: %(n)s. The job fails at %(m)s.", n=losses.own, m=losses.most_own)
        sentences.append(str(own))
    if losses.shared:
        shared = _l(
            "Losses of processes that ran other jobs too: %(n)s. The job fails at %(most)s losses of any kind.",
            n=losses.shared,
            most=MOST_LOSSES,
        )
        sentences.append(str(shared))
    return sentences


_BY_PREFIX = (
    ("PROVIDER_", Explanation(_l("The provider failed."), _RETRY_LATER)),
    ("VALIDATION_", Explanation(_l("The answer could not be used."), _RETRY_ONCE)),
    ("CONTENT_SAFETY_", FAILURES["CONTENT_SAFETY_BLOCKED"]),
    ("CREDENTIAL_", Explanation(_l("The user's own key could not be used."), _USER_MUST_FIX)),
)


def explain_failure(code: str | None) -> Explanation:
    """Return the explanation of an error code; for an unknown one its prefix's, otherwise that of INTERNAL_ERROR."""
    code = code or "INTERNAL_ERROR"
    if code in FAILURES:
        return FAILURES[code]
    for prefix, explanation in _BY_PREFIX:
        if code.startswith(prefix):
            return explanation
    return FAILURES["INTERNAL_ERROR"]


WAITS: Mapping[str, Explanation] = {
    "paused": Explanation(_l("The queue is paused."), _l("The job starts when the queue is resumed.")),
    "not_due": Explanation(_l("Waiting for the next attempt."), _l("Nothing to do. It runs again at the time shown.")),
    "breaker_open": Explanation(
        _l("Postponed: the breakers of all its providers are open."),
        _l("This wait uses up no retry. The job runs again automatically at the time shown."),
    ),
    "providers_busy": Explanation(
        _l("Postponed: all concurrent calls of its providers were in use."),
        _l("Nothing to do. No retry is used up, and it runs again at the time shown."),
    ),
    "not_sent": Explanation(
        _l("The job is saved, but its message has not reached the broker yet."),
        _l("This usually takes seconds. If it takes longer, check that the broker and the maintenance worker run."),
    ),
    "broker_away": Explanation(
        _l("The broker can't be reached, so no job is sent to workers."),
        _l("Start the broker. The job is safe in the database and is sent automatically."),
    ),
    "broker_refuses": Explanation(
        _l("The broker takes no writes, so no job is sent to workers."),
        _l("Repair the broker. The job is safe in the database and is sent automatically."),
    ),
    "no_worker": Explanation(
        _l("No live worker serves this queue."), _l("Start a worker for this queue. No job is lost in the meantime.")
    ),
    "in_line": Explanation(_l("The message is in the broker, waiting for a free worker."), _l("Nothing to do.")),
    "running": Explanation(_l("A worker is running it."), _l("Nothing to do.")),
    "lease_expired": Explanation(
        _l("The worker's lease has expired. The worker is probably lost."),
        _l("The reaper releases the job within a minute, and another worker takes over."),
    ),
    "cancelling": Explanation(
        _l("A cancel was requested and the worker is stopping."), _l("This usually takes about a second.")
    ),
}
"""Why a job that isn't final waits or runs."""
