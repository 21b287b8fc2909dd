"""The delivery strip: six stations of a job between commit and result, and when it reached each.

A station is done, now (the job is here), ahead, skipped (the job didn't pass it), gap (the job is here for too long),
failed or stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from flask_babel import gettext

from aijobs.jobs.history import HistoryType
from aijobs.jobs.status import JobState
from aijobs.monitor.views import HistoryEntry, JobDetail, WorkerRow
from aijobs.monitor.waits import due_at, enqueue_event, lease_expired
from aijobs.outbox.models import OutboxState
from aijobs.web.console.words import worker_name

OVERDUE = timedelta(seconds=30)
"""How long a job may stay at a station that takes a second or two."""


@dataclass(frozen=True)
class Station:
    """One station. `took`: time since the previous station."""

    name: str
    label: str
    step: str
    at: datetime | None = None
    note: str = ""
    took: timedelta | None = None


def build_strip(detail: JobDetail, holder: WorkerRow | None, lease_grace: timedelta) -> list[Station]:
    """Build the strip of a job. `holder`: the worker with its lease, if its heartbeat was read."""
    stations = [
        Station("committed", gettext("Committed"), "done", detail.job.created_at),
        _outbox(detail),
        _broker(detail),
        _lease(detail, holder, lease_grace),
        _answer(detail),
        _result(detail),
    ]
    return _with_durations(stations)


def last(detail: JobDetail, event_type: HistoryType) -> HistoryEntry | None:
    """Return the newest history row of a type."""
    return next((entry for entry in reversed(detail.history) if entry.type == event_type), None)


def _waits(detail: JobDetail) -> bool:
    return not detail.job.final and detail.job.locked_by is None


def _outbox(detail: JobDetail) -> Station:
    event, label = enqueue_event(detail), gettext("Outbox")
    if event is None:
        return Station("outbox", label, "gap", note=gettext("No event"))
    if event.status == OutboxState.DEAD:
        return Station("outbox", label, "failed", event.created_at, gettext("Dead"))
    if event.status == OutboxState.PUBLISHED and event.published_at is None:
        return Station("outbox", label, "skipped")  # The job was cancelled before the event was sent.
    if event.status == OutboxState.PUBLISHED or not _waits(detail):
        return Station("outbox", label, "done", event.created_at)
    if event.available_at > detail.read_at:
        return Station("outbox", label, "now", event.available_at, _next_attempt(detail))
    if event.last_sent_at is not None:
        return Station("outbox", label, "done", event.created_at)
    late = detail.read_at - event.available_at > OVERDUE
    return Station("outbox", label, "gap" if late else "now", event.available_at, gettext("Not sent yet"))


def _broker(detail: JobDetail) -> Station:
    event, label = enqueue_event(detail), gettext("Broker")
    sent = event.last_sent_at or event.published_at if event else None
    if not _waits(detail):
        reached = sent is not None or last(detail, HistoryType.LOCKED) is not None
        return Station("broker", label, "done" if reached else "skipped", sent)
    if sent is None or (event and event.available_at > detail.read_at):
        return Station("broker", label, "ahead")
    late = detail.read_at - max(due_at(detail), sent) > OVERDUE
    note = gettext("Waiting for a worker")
    if event and event.redrives:
        note = gettext("Sent again %(n)s times", n=event.redrives)
    return Station("broker", label, "gap" if late else "now", sent, note)


def _lease(detail: JobDetail, holder: WorkerRow | None, grace: timedelta) -> Station:
    label, locked = gettext("Leased"), last(detail, HistoryType.LOCKED)
    if _waits(detail):
        return Station("leased", label, "ahead")
    if locked is None:
        return Station("leased", label, "skipped")
    who = worker_name(locked.instance)
    if detail.job.final:
        return Station("leased", label, "done", locked.at, who)
    if lease_expired(detail, grace):
        return Station("leased", label, "gap", detail.job.lock_until, gettext("%(worker)s: lease expired", worker=who))
    if holder is not None and holder.age_s is not None:
        who = gettext("%(worker)s, heartbeat %(n)s s ago", worker=who, n=int(holder.age_s))
    return Station("leased", label, "now", locked.at, who)


def _answer(detail: JobDetail) -> Station:
    label, saved = gettext("Answer saved"), last(detail, HistoryType.OUTPUT_SAVED)
    if saved is not None:
        return Station("answer", label, "done", saved.at)
    return Station("answer", label, "skipped" if detail.job.final else "ahead")


def _result(detail: JobDetail) -> Station:
    job = detail.job
    steps: dict[str, tuple[str, str]] = {
        JobState.SUCCEEDED: ("done", gettext("Result committed")),
        JobState.FAILED: ("failed", gettext("Failed")),
        JobState.CANCELLED: ("stopped", gettext("Cancelled")),
    }
    step, label = steps.get(job.lifecycle_status, ("ahead", gettext("Result committed")))
    note = ""
    if job.lifecycle_status == JobState.SUCCEEDED:
        note = gettext("%(n)s artifacts", n=job.artifact_count)
    return Station("result", label, step, job.finished_at, note)


def _with_durations(stations: list[Station]) -> list[Station]:
    timed: list[Station] = []
    before: datetime | None = None
    for station in stations:
        at = station.at if station.step in ("done", "now", "failed", "stopped") else None
        timed.append(replace(station, took=at - before) if at and before and at >= before else station)
        before = at or before
    return timed


def _next_attempt(detail: JobDetail) -> str:
    return gettext("Attempt %(n)s due", n=detail.job.attempt_no + 1)
