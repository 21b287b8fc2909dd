"""The words for stored values: states, roles, events. A value without a word is shown as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flask_babel import gettext
from flask_babel import lazy_gettext as _l
from flask_babel import lazy_pgettext as _lp

from aijobs.definitions.definition import QUEUES
from aijobs.ids import InstanceId
from aijobs.jobs.history import HistoryType
from aijobs.web.context import language, services

WORDS: Mapping[str, Any] = {
    # phases and states of a job
    "created": _l("Created"),
    "queued": _l("Queued"),
    "running": _l("Running"),
    "retrying": _l("Retrying"),
    "cancel_requested": _l("Cancel requested"),
    "succeeded": _l("Succeeded"),
    "failed": _l("Failed"),
    "cancelled": _l("Cancelled"),
    # outbox
    "pending": _l("Pending"),
    "processing": _l("Sending"),
    "published": _l("Published"),
    "dead": _l("Dead"),
    "ai.job.enqueue": _l("Enqueue"),
    "ai.job.completed": _l("Job succeeded"),
    "ai.job.failed": _l("Job failed"),
    "ai.job.cancelled": _l("Job cancelled"),
    # workers and queues
    "live": _lp("worker", "Live"),
    "stalled": _l("Not taking messages"),
    "late": _l("Late"),
    "lost": _l("Lost"),
    "paused": _l("Paused"),
    # the passes of the maintenance consumers
    "on_time": _l("On time"),
    "failing": _l("Failing"),
    "overdue": _l("Overdue"),
    # breakers
    "closed": _l("Breaker closed"),
    "open": _l("Breaker open"),
    "half_open": _l("Breaker half-open"),
    # provider calls
    "started": _l("In progress"),
    "done": _l("Answered"),
    "yes": _l("Yes"),
    "no": _l("No"),
    "unknown": _l("Unknown"),
    "platform_key": _l("Platform key"),
    "user_deepseek_key": _l("User's DeepSeek key"),
    # who started a job
    "user": _l("User"),
    "admin": _l("Operator"),
    "system": _l("System"),
    # the audit log
    "job.retry": _l("Job retried"),
    "job.cancel": _l("Job cancel requested"),
    "job.reveal": _l("Content revealed"),
    "outbox.requeue": _l("Event sent again"),
    "provider.close_breaker": _l("Breaker closed manually"),
    "credential.resolve": _l("Key sent to a service"),
    "credential.rotate": _l("Stored keys re-encrypted"),
    "operator.create": _l("Operator created"),
    "operator.disable": _l("Operator disabled"),
    "operator.enable": _l("Operator enabled"),
    "operator.password": _l("Password changed"),
    "operator.token": _l("Token created"),
    "operator.revoke_token": _l("Token revoked"),
    "operator.revoke_session": _l("Session revoked"),
    "login": _l("Signed in"),
    "login_failed": _l("Wrong password"),
    # roles and environments
    "VIEWER": _l("Viewer"),
    "OPERATOR": _l("Operator"),
    "SUPER_ADMIN": _l("Super admin"),
    "development": _l("Development"),
    "production": _l("Production"),
}

EVENT_WORDS: Mapping[str, Any] = {
    "created": _l("Created"),
    "locked": _l("Started"),
    "provider_called": _l("Provider called"),
    "output_saved": _l("Answer saved"),
    "retry_scheduled": _l("Failed, waiting for retry"),
    "released": _l("Released by its worker"),
    "postponed": _l("Postponed: no provider available"),
    "lease_lost": _l("Worker lost (counted)"),
    "cancel_requested": _l("Cancel requested"),
    "succeeded": _l("Succeeded"),
    "failed": _l("Failed"),
    "cancelled": _l("Cancelled"),
}
"""The words of each history type."""

_LOST_UNCHARGED = _l("Worker lost (not counted: other jobs ran in its process)")

REDACTION_WORDS: Mapping[str, Any] = {
    "card": _l("Bank cards masked"),
    "credentials": _l("Credentials in URLs masked"),
    "email": _l("Email addresses masked"),
    "id": _l("Resident ids masked"),
    "key": _l("API keys masked"),
    "phone": _l("Phone numbers masked"),
    "private_key": _l("Private keys masked"),
    "secret": _l("Passwords and other secrets masked"),
    "token": _l("Tokens masked"),
}
"""The words for the findings of each redaction rule."""

GROUP_WORDS: Mapping[str, Any] = {
    "day": _l("Day"),
    "jobType": _l("Type"),
    "provider": _l("Provider"),
    "model": _l("Model"),
    "user": _l("User"),
}
"""The groups of usage."""

PASS_WORDS: Mapping[str, Any] = {
    "dispatcher": _l("Send due events"),
    "claim_release": _l("Release claims of dead dispatchers"),
    "reaper": _l("Take over lost leases"),
    "redrive": _l("Resend lost messages"),
    "snapshot_cleanup": _l("Delete expired snapshots"),
    "retention": _l("Delete old jobs and sessions"),
}

TONES: Mapping[str, str] = {
    "running": "run",
    "processing": "run",
    "started": "run",
    "locked": "run",
    "provider_called": "run",
    "output_saved": "ok",
    "succeeded": "ok",
    "published": "ok",
    "live": "ok",
    "on_time": "ok",
    "closed": "ok",
    "half_open": "warn",
    "open": "bad",
    "done": "ok",
    "retrying": "warn",
    "cancel_requested": "warn",
    "retry_scheduled": "warn",
    "stalled": "bad",
    "late": "warn",
    "paused": "warn",
    "released": "warn",
    "postponed": "warn",
    "failed": "bad",
    "dead": "bad",
    "lost": "bad",
    "failing": "bad",
    "overdue": "bad",
    "lease_lost": "bad",
}
"""Five tones for all states: idle (the default), run, ok, warn, bad."""


def broker_cause(cause: str | None) -> str:
    """Return what is wrong with the broker, in the current language; a detail after the colon stays as it is."""
    text, colon, detail = (cause or "").partition(": ")
    if text in QUEUES:  # Only this queue is affected.
        return f"{text}: {broker_cause(detail)}"
    return f"{gettext(text)}{colon}{detail}" if text else ""


def word(name: str) -> str:
    """Return the word for `name` in the current language, otherwise `name`."""
    return str(WORDS.get(name, name))


def event_word(name: str, error_code: str | None) -> str:
    """Return the words for a history row in the current language, otherwise its type."""
    if name == HistoryType.LEASE_LOST and error_code is None:
        return str(_LOST_UNCHARGED)
    return str(EVENT_WORDS.get(name, name))


def pass_word(name: str) -> str:
    """Return what a pass does in the current language, otherwise its name."""
    return str(PASS_WORDS.get(name, name))


def redaction_word(rule: str) -> str:
    """Return the words for a redaction rule's findings in the current language, otherwise the rule."""
    return str(REDACTION_WORDS.get(rule, rule))


def tone(name: str) -> str:
    """Return the tone of a state: idle, run, ok, warn or bad."""
    return TONES.get(name, "idle")


def type_label(job_type: str) -> str:
    """Return the label of a job type in the current language; for an unknown type its name."""
    definition = services().registry.find(job_type)
    if definition is None:
        return job_type
    return definition.metadata.labels.get(language(), definition.metadata.label)


def worker_name(instance: str | None) -> str:
    """Return host and pid of an instance id or lease token; another text as it is."""
    known = InstanceId.parse(instance) if instance else None
    return f"{known.host}:{known.pid}" if known else (instance or "")
