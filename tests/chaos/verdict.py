"""The promises, compared with the evidence at the end. Each rule yields the broken promises with their jobs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from aijobs.ai.models import CallState
from aijobs.definitions.definition import MOST_LOSSES, QUEUES
from aijobs.errors import Retried, describe, is_internal
from aijobs.jobs.history import WORKER
from aijobs.jobs.models import AiJob
from aijobs.jobs.status import FINAL, JobState
from aijobs.monitor.check import Report
from aijobs.outbox.models import OutboxState
from tests.chaos.accounts import judge_accounts
from tests.chaos.broken import Broken
from tests.chaos.driver import Book, Promise
from tests.chaos.evidence import Evidence
from tests.chaos.plan import POISONED, SYNTHETIC, Create
from tests.chaos.stage import Role

DATABASE_CODES = ("INTERNAL_DATABASE", "INTERNAL_PROJECTION")
"""Codes of an attempt that lost its database twice."""
SERVER_CODES = (
    *("PROVIDER_UNAVAILABLE", "PROVIDER_RATE_LIMITED", "PROVIDER_TIMEOUT", "PROVIDER_STREAM_BROKEN", "TIMEOUT"),
    *("PROVIDER_CONNECTION_LOST", "PROVIDER_EMPTY_OUTPUT", "VALIDATION_TRUNCATED", "VALIDATION_OUTPUT_NOT_JSON"),
)
"""Codes of a job whose provider is a server, after all its retries: besides its script, the server may be down and
workers may be suspended during a call.
"""
GIVEN_UP = ("lease_lost", "released", "postponed", "retry_scheduled", "cancelled", "failed")
"""How an attempt may end if its answer was paid for and not saved."""


def judge(evidence: Evidence, book: Book, *, database_faults: bool) -> list[Broken]:
    """Return all broken promises."""
    found: list[Broken] = [Broken(f"a surprising answer: {surprise}") for surprise in book.surprises]
    for promise in book.promises.values():
        found += _one_job_each(evidence, promise)
    asked = _creates_by_job(evidence, book)
    for job in evidence.jobs.values():
        if job.id not in asked:
            found.append(Broken("is a job that nobody asked for", (job.id,)))
            continue
        found += _ended_as_allowed(evidence, job, asked[job.id], book, database_faults)
        found += _refused_alone(evidence, job)
        found += _charged_for_its_own_deaths(job, asked[job.id])
        found += _holder_alone_wrote(evidence, job)
        found += _results_once(evidence, job, asked[job.id])
        found += _paid_once(evidence, job)
    return [*found, *judge_accounts(evidence)]


def judge_report(report: Report, when: str) -> list[Broken]:
    """Return the findings of `aijobs check`."""
    return [
        Broken(f"aijobs check {when}: promise {finding.promise}: {finding.count} × {finding.what}", finding.job_ids)
        for finding in report.findings
    ]


def judge_roles(roles: dict[str, Role]) -> Iterator[Broken]:
    """Check that every dead process was started again and runs."""
    for role in roles.values():
        alive = role.program is not None and role.program.is_running
        if not alive or role.starts != role.ends.total() + 1:
            yield Broken(f"{role.name} was started {role.starts} times, ended {dict(role.ends)}, and runs: {alive}")


# --- what was asked for --------------------------------------------------------------------------------------------


def _roots(evidence: Evidence, create: Create) -> list[AiJob]:
    return [
        job
        for job in evidence.jobs.values()
        if job.target_id == create.target_id and job.job_type == create.job_type and job.parent_job_id is None
    ]


def _one_job_each(evidence: Evidence, promise: Promise) -> Iterator[Broken]:
    create, roots = promise.create, _roots(evidence, promise.create)
    ids = tuple(job.id for job in roots)
    answered = set(promise.job_ids)
    if create.key is not None or len(promise.job_ids) + promise.unanswered <= 1:
        if len(roots) > 1:
            yield Broken(f"{create.target_id} was asked for once, and is {len(roots)} jobs", ids)
        if len(answered) > 1:
            yield Broken(f"{create.target_id}: one key was answered with several jobs", tuple(answered))
        if promise.made > 1:
            yield Broken(f"{create.target_id}: two answers said that they created the job", tuple(answered))
    if missing := answered - set(ids):
        yield Broken(f"{create.target_id}: an answer named a job that does not exist", tuple(missing))
    if missing := set(promise.chain) - set(evidence.jobs):
        yield Broken(f"{create.target_id}: a retry's answer named a job that does not exist", tuple(missing))


def _creates_by_job(evidence: Evidence, book: Book) -> dict[str, Create]:
    by_target = {(p.create.target_id, p.create.job_type): p.create for p in book.promises.values()}
    return {
        job.id: by_target[job.target_id, job.job_type]
        for job in evidence.jobs.values()
        if (job.target_id, job.job_type) in by_target
    }


# --- how it ended --------------------------------------------------------------------------------------------------


def _ended_as_allowed(
    evidence: Evidence, job: AiJob, create: Create, book: Book, database_faults: bool
) -> Iterator[Broken]:
    if job.lifecycle_status not in FINAL:
        yield Broken(f"has not ended: {job.lifecycle_status}", (job.id,))
    elif job.id in book.cancelled:
        if job.lifecycle_status != JobState.CANCELLED:
            yield Broken(f"had its cancel acknowledged and is {job.lifecycle_status}", (job.id,))
    elif job.lifecycle_status == JobState.SUCCEEDED:
        if create.script.fails_with is not None:
            yield Broken(f"was to fail with {create.script.fails_with} and succeeded", (job.id,))
    elif job.lifecycle_status == JobState.FAILED and not _may_fail(evidence, job, create, database_faults):
        yield Broken(
            f"({create.script.name}) failed with {job.error_code}; lost {job.losses}, retries {job.retry_count}",
            (job.id,),
        )


def _charged_for_its_own_deaths(job: AiJob, create: Create) -> Iterator[Broken]:
    """Check that only a poison job is charged with losses, and that it fails only after as many as its queue allows."""
    if create.script.fails_with != POISONED:
        if job.lost_count:
            yield Broken(f"({create.script.name}) is charged with {job.lost_count} losses", (job.id,))
        return
    early = job.lost_count < QUEUES[job.queue_name].attempts and job.losses < MOST_LOSSES
    if job.lifecycle_status == JobState.FAILED and early:
        yield Broken(f"is poison and failed at {job.lost_count} deaths of its own", (job.id,))


def _may_fail(evidence: Evidence, job: AiJob, create: Create, database_faults: bool) -> bool:
    if job.error_code == create.script.fails_with:
        return True
    if job.error_code == POISONED:
        return job.uncharged_losses >= MOST_LOSSES
    if job.error_code == "INTERNAL_NOT_DISPATCHED":  # A refusal by the broker doesn't count as an attempt.
        dead = [event for event in evidence.events[job.id] if event.status == OutboxState.DEAD]
        return any(event.attempt_count >= 3 and (event.last_error or "").endswith("dispatcher lost") for event in dead)
    tried = [event.error_code for event in evidence.history[job.id] if event.type == "retry_scheduled"]
    if create.is_served and job.error_code in SERVER_CODES:
        once = describe(job.error_code).retried is Retried.ONCE
        return job.retry_count >= job.max_retry_count or (once and job.error_code in tried)
    # The script may have used the one retry of such a code.
    internal = any(is_internal(code) for code in tried if code)
    return database_faults and job.error_code in DATABASE_CODES and (internal or job.retry_count >= 2)


def _refused_alone(evidence: Evidence, job: AiJob) -> Iterator[Broken]:
    """Check that no event failed because Redis refused its queue: such events are released and sent later."""
    for event in evidence.events[job.id]:
        if event.last_error and not event.last_error.endswith("dispatcher lost"):
            yield Broken(f"has an event that was blamed: {event.last_error}", (job.id,))


def _holder_alone_wrote(evidence: Evidence, job: AiJob) -> Iterator[Broken]:
    """Check that only the worker that locked an attempt wrote its history."""
    holders: dict[int, str | None] = {}
    for event in evidence.history[job.id]:
        if event.type == "locked":
            holders[event.attempt_no] = event.instance
        elif event.actor == WORKER and event.instance != holders.get(event.attempt_no):
            yield Broken(f"has {event.type} of attempt {event.attempt_no}, not written by its holder", (job.id,))


# --- results and money ---------------------------------------------------------------------------------------------


def _results_once(evidence: Evidence, job: AiJob, create: Create) -> Iterator[Broken]:
    artifacts, rows = evidence.artifacts.get(job.id, 0), evidence.business_rows.get(job.id, 0)
    wanted = job.artifact_count if job.lifecycle_status == JobState.SUCCEEDED else 0
    if artifacts != wanted:
        yield Broken(f"is {job.lifecycle_status} with {artifacts} artifacts instead of {wanted}", (job.id,))
    if create.job_type != SYNTHETIC and rows != wanted:
        yield Broken(f"is {job.lifecycle_status} with {rows} business rows instead of {wanted}", (job.id,))


def _paid_once(evidence: Evidence, job: AiJob) -> Iterator[Broken]:
    history = evidence.history[job.id]
    saved_at = next((event.attempt_no for event in history if event.type == "output_saved"), None)
    calls = evidence.calls_of(job.id)
    attempts = [call.attempt_no for call in calls]
    for attempt_no, of_attempt in groupby(calls, lambda call: call.attempt_no):
        asked = list(of_attempt)
        if len({call.provider for call in asked}) != len(asked):
            yield Broken(f"asked one provider twice in attempt {attempt_no}", (job.id,))
        if any(call.answered for call in asked[:-1]):
            yield Broken(f"asked another provider in attempt {attempt_no}, which had its answer", (job.id,))
    if saved_at is not None and not _is_paid(evidence, job, saved_at):
        yield Broken(f"saved an answer of attempt {saved_at} with no call that is done", (job.id,))
    if saved_at is not None and attempts and max(attempts) > saved_at:
        yield Broken(f"saved its answer at attempt {saved_at} and asked again: {attempts}", (job.id,))
    for call in calls:
        ended = [event.type for event in history if event.attempt_no == call.attempt_no and event.type in GIVEN_UP]
        if call.answered and call.attempt_no != saved_at and not ended:
            yield Broken(f"has an answer of attempt {call.attempt_no} that nobody saved or gave up", (job.id,))


def _is_paid(evidence: Evidence, job: AiJob, attempt_no: int) -> bool:
    return any(row.attempt_no == attempt_no and row.state == CallState.DONE for row in evidence.usage[job.id])
