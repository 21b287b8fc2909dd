"""The summary of a run, and the timeline of a job with a broken promise."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from tests.chaos.driver import Book
from tests.chaos.evidence import Evidence
from tests.chaos.faults import Faults
from tests.chaos.plan import Plan
from tests.chaos.provider import NAME

WIDTH = 118


def count_crashes(crashes: Iterable[Mapping[str, object]]) -> Counter[str]:
    """Count the crashes at each point."""
    return Counter(str(line["point"]) for line in crashes)


def summary(
    plan: Plan,
    kind: str,
    book: Book,
    faults: Faults,
    crashes: Counter[str],
    dropped: int,
    evidence: Evidence,
    outputs: Mapping[str, list[str]],
    times: Mapping[str, float],
) -> str:
    """Return the summary of actions, faults and results."""
    jobs = evidence.jobs.values()
    ends = Counter(f"{j.lifecycle_status}{f' {j.error_code}' if j.error_code else ''}" for j in jobs)
    calls = evidence.calls.values()
    states = Counter(row.state for rows in evidence.usage.values() for row in rows)
    redrives = sum(event.redrives for events in evidence.events.values() for event in events)
    restarts = Counter({name: len(of_role) - 1 for name, of_role in outputs.items()})
    log = "".join(text for of_role in outputs.values() for text in of_role)
    armed = Counter(fault.target for fault in plan.faults if fault.kind == "crash")
    lines = [
        ("chaos", f"{kind}, seed {plan.seed}, {plan.seconds:g} s"),
        ("seconds", ", ".join(f"{name} {seconds:.1f}" for name, seconds in times.items())),
        ("actions", f"{len(plan.actions)}: {_counted(book.answers)}"),
        ("faults", f"{faults.done.total()}: {_counted(faults.done)}; messages dropped {dropped}"),
        ("crash points", f"{crashes.total()} of {armed.total()} armed were reached: {_counted(crashes)}"),
        ("restarts", _counted(restarts)),
        ("jobs", f"{len(evidence.jobs)}: {_counted(ends)}"),
        ("calls", f"{len(calls)} made, {sum(c.answered for c in calls)} answered; usage rows: {_counted(states)}"),
        ("server", f"{len(evidence.bill)} requests: {_counted(Counter(billed.step for billed in evidence.bill))}"),
        ("billed", _billed(evidence)),
        (
            "breaker",
            f"opened {log.count('breaker.opened')}, attempts postponed {log.count('job.postponed')}, "
            f"creates refused {sum(promise.refused for promise in book.promises.values())}",
        ),
        (
            "recovery",
            f"takeovers {sum(j.losses for j in jobs)}, released {_types(evidence, 'released')}, "
            f"retries {_types(evidence, 'retry_scheduled')}, redrives {redrives}, "
            f"attempts that lost their lease {len(re.findall('job.lock_lost', log))}",
        ),
        ("tracebacks", str(log.count("Traceback (most recent call last)"))),
    ]
    return "\n".join(_wrapped(name, text) for name, text in lines)


def _billed(evidence: Evidence) -> str:
    """Count the usage rows of the server's calls by `billed`, and the possibly billed ones that the server counted."""
    rows = [row for row in evidence.rows.values() if row.provider == NAME]
    counted = {billed.usage_id for billed in evidence.bill if billed.counted is not None}
    possibly = [row.id for row in rows if row.billed == "unknown"]
    stated = Counter(row.billed for row in rows)
    return (
        f"yes {stated['yes']}, no {stated['no']}, possibly {len(possibly)}, of which the server counted "
        f"{len(counted.intersection(possibly))}; answered whole {sum(b.answered for b in evidence.bill)}, "
        f"left by the client {sum(b.left for b in evidence.bill)}"
    )


def _wrapped(name: str, text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=f"{name:>13}  ", subsequent_indent=" " * 15, break_long_words=False
    )


def timeline(evidence: Evidence, book: Book, job_id: str) -> str:
    """Return everything known about one job, in order of time."""
    job = evidence.jobs.get(job_id)
    if job is None:
        return f"job {job_id} is not in the database"
    entries: list[tuple[datetime, str]] = []
    for event in evidence.history[job_id]:
        who = f"{event.actor} {event.instance or ''}".strip()
        entries.append((event.at, f"history  {event.seq:2} {event.type} (attempt {event.attempt_no}) {who}"))
    for row in evidence.events[job_id]:
        state = f"{row.status}, claims {row.attempt_count}, redrives {row.redrives}, sent {_clock(row.last_sent_at)}"
        entries.append((row.created_at, f"event    {row.dedupe_key[-60:]}: {state}, due {_clock(row.available_at)}"))
    for usage in evidence.usage[job_id]:
        closed = f"{usage.state} at {_clock(usage.finished_at)}"
        call_no = f"{usage.attempt_no}.{usage.call_no} {usage.provider}, billed {usage.billed}"
        entries.append((usage.started_at, f"usage    {usage.id} call {call_no}: {closed} {usage.error_code or ''}"))
    own = {usage.id for usage in evidence.usage[job_id]}
    for billed in evidence.bill:
        if billed.usage_id in own and billed.at is not None:
            how = "answered" if billed.answered else "left by the client" if billed.left else f"status {billed.status}"
            entries.append((billed.at, f"server   {billed.request_id} {billed.step}: {how}"))
    for call in evidence.calls_of(job_id):
        for line in call.lines:
            at = datetime.fromtimestamp(line["at"], UTC)
            entries.append((at, f"ledger   {line['what']} (attempt {call.attempt_no}, pid {line['pid']})"))
    head = (
        f"job {job.id} ({job.job_type}, {job.target_id}): {job.lifecycle_status} {job.error_code or ''} "
        f"attempt {job.attempt_no}, lost {job.lost_count} + {job.uncharged_losses}, retries {job.retry_count}, "
        f"held by {job.locked_by}, "
        f"next attempt {_clock(job.next_attempt_at)}, cancel asked {_clock(job.cancel_requested_at)}"
    )
    asked = next((p.notes for p in book.promises.values() if p.create.target_id == job.target_id), [])
    lines = [f"  {_clock(at)} {text}" for at, text in sorted(entries, key=lambda entry: entry[0])]
    return "\n".join([head, *(f"  asked    {note}" for note in asked), *lines])


def _clock(at: datetime | None) -> str:
    return at.astimezone(UTC).time().isoformat("milliseconds") if at else "-"


def _types(evidence: Evidence, event_type: str) -> int:
    return sum(event.type == event_type for events in evidence.history.values() for event in events)


def _counted(counter: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()) if count) or "none"
