"""What answers look like: whitelists, key by key. A key without a value is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from flask import Response, jsonify

from aijobs.canonical import json_name
from aijobs.credentials.store import Credential
from aijobs.errors import describe
from aijobs.jobs.status import SUCCEEDED
from aijobs.monitor.usage_filter import UsageFilter
from aijobs.monitor.views import (
    Artifact,
    CallSums,
    ChainLink,
    HistoryEntry,
    JobDetail,
    JobRow,
    JobView,
    OutboxRow,
    OutboxStatus,
    ProviderRow,
    Providers,
    QueueStatus,
    SnapshotDescription,
    Usage,
    UsageGroup,
    UsageRow,
    UsageTotal,
    Wait,
    WorkerRow,
)
from aijobs.web.context import language
from aijobs.web.explanations import explain_losses
from aijobs.web.shapes import breaker, present, to_ms, waiting

_SPENT = ("promptTokens", "completionTokens", "cachedTokens", "costMicros", "currency", "priceVersion")
"""What of a provider call only those may see who may see usage."""


def answer(body: Mapping[str, Any], status: int = 200, location: str | None = None) -> Response:
    """A JSON answer in the request's language."""
    response = jsonify(body)
    response.status_code = status
    response.headers["Content-Language"] = language()
    response.vary.add("Accept-Language")
    if location is not None:
        response.headers["Location"] = location
    return response


def no_content() -> Response:
    """204: done, and there is nothing to say."""
    return Response(status=204)


def user_job(view: JobView, lang: str) -> dict[str, Any]:
    """The Job that a user sees."""
    job = view.job
    body = _job(job, lang)
    if job.lifecycle_status == SUCCEEDED:
        artifacts = [_artifact(each) for each in view.artifacts]
        body["result"] = {"artifactCount": job.artifact_count, "artifacts": artifacts}
    return body


def admin_job(job: JobRow, lang: str) -> dict[str, Any]:
    """A job in an operator's list."""
    return _job(job, lang) | present(
        userId=job.user_id,
        targetType=job.target_type,
        targetId=job.target_id,
        triggerType=job.trigger_type,
        credentialMode=job.credential_mode,
        parentJobId=job.parent_job_id,
        rootId=job.root_id,
        retryCount=job.retry_count,
        lostCount=job.lost_count,
        unchargedLosses=job.uncharged_losses,
        maxRetryCount=job.max_retry_count,
        lockedBy=job.locked_by,
        lockUntil=job.lock_until,
        cancelRequestedBy=job.cancel_requested_by,
        artifactCount=job.artifact_count,
        newestJobId=job.newest_id,
        newestLifecycleStatus=job.newest_status,
        recoveredBy=job.recovered_by,
        retryable=job.retry_refusal is None,
        retryRefusal=job.retry_refusal,
        cancellable=job.cancel_refusal is None,
        cancelRefusal=job.cancel_refusal,
    )


def admin_detail(detail: JobDetail, wait: Wait | None, lang: str, *, usage: bool) -> dict[str, Any]:
    """Everything of one job but its content; tokens and cost with `usage` alone."""
    body = admin_job(detail.job, lang) | present(
        waiting=waiting(wait) if wait else None,
        lossExplanation=" ".join(explain_losses(detail)) or None,
        inputSchemaVersion=detail.input_schema_version,
        outputSchemaVersion=detail.output_schema_version,
        promptVersion=detail.prompt_version,
        credentialId=detail.credential_id,
        outputHash=detail.output_hash,
        internalErrorMessage=detail.internal_error_message,
        snapshot=_snapshot(detail.snapshot) if detail.snapshot else None,
        artifacts=[_artifact(each) for each in detail.artifacts],
        history=[_history(each) for each in detail.history],
        outbox=[outbox_event(each) for each in detail.outbox],
        usage=[_call(each, usage) for each in detail.usage],
        chain=[_link(each) for each in detail.chain],
    )
    if usage:
        body |= {"usageTotal": usage_total(detail.usage_total), "chainTotal": usage_total(detail.chain_total)}
    return body


def credential(stored: Credential) -> dict[str, Any]:
    """A key of the user's own, by what it is recognised by."""
    return present(
        credentialId=stored.id,
        mode=stored.mode,
        label=stored.label,
        lastFour=stored.last_four,
        fingerprint=stored.fingerprint,
        createdAt=stored.created_at,
        lastUsedAt=stored.last_used_at,
    )


def outbox_event(row: OutboxRow) -> dict[str, Any]:
    """An outbox event; its dedupe key and payload stay inside."""
    return present(
        eventId=row.id,
        eventType=row.event_type,
        jobId=row.job_id,
        queueName=row.queue_name,
        status=row.status,
        attemptCount=row.attempt_count,
        availableAt=row.available_at,
        lockedBy=row.locked_by,
        lockedAt=row.locked_at,
        publishedAt=row.published_at,
        lastSentAt=row.last_sent_at,
        redrives=row.redrives,
        lastError=row.last_error,
        createdAt=row.created_at,
        requeueable=row.requeueable,
    )


def queue_status(queue: QueueStatus) -> dict[str, Any]:
    """A queue; what only the broker knows is null while it is away."""
    paused = queue.paused
    body = present(
        queueName=queue.queue_name,
        waiting=queue.queued.value + queue.retrying.value,
        queued=queue.queued.value,
        retrying=queue.retrying.value,
        active=queue.active.value,
        oldestQueuedAt=queue.oldest_queued_at,
        oldestAgeMs=to_ms(queue.oldest_age_s),
        paused=present(reason=paused.reason, by=paused.by, at=paused.at) if paused else None,
    )
    return body | {"brokerDepth": queue.broker_depth, "workers": queue.workers}


def outbox_status(outbox: OutboxStatus) -> dict[str, Any]:
    """The outbox at a glance."""
    return present(
        counts={status: count.value for status, count in outbox.counts.items()},
        oldestPendingAt=outbox.oldest_pending_at,
        lagMs=to_ms(outbox.lag_s),
        dead=[outbox_event(row) for row in outbox.dead],
        unknownTypes=[outbox_event(row) for row in outbox.unknown_types],
    )


def worker(row: WorkerRow) -> dict[str, Any]:
    """A worker process."""
    return present(
        instanceId=row.instance_id,
        queueName=row.queue_name,
        host=row.host,
        pid=row.pid,
        startedAt=row.started_at,
        state=row.state,
        heartbeatAgeMs=to_ms(row.age_s),
        activeJobCount=row.active_job_count,
        activeJobIds=list(row.active_job_ids),
        holds=[_camel(asdict(job)) for job in row.holds],
    )


def providers(found: Providers, *, usage: bool) -> dict[str, Any]:
    """All AI providers; tokens and cost with `usage` alone."""
    return present(day=found.day, providers=[_provider(row, usage) for row in found.providers])


def _provider(row: ProviderRow, usage: bool) -> dict[str, Any]:
    return present(
        name=row.name,
        host=row.host,
        key=row.key,
        breaker=breaker(row.breaker),
        callLimit=row.limit,
        callsInFlight=row.in_flight,
        models=[{"model": model.model} | _calls(model.today, usage) for model in row.models],
    )


def _calls(sums: CallSums, usage: bool) -> dict[str, Any]:
    counted = present(
        calls=sums.calls, failedCalls=sums.failed, callsUnderWay=sums.under_way, medianLatencyMs=sums.median_ms
    )
    if not usage:
        return counted
    return counted | present(
        promptTokens=sums.prompt_tokens,
        completionTokens=sums.completion_tokens,
        costs=[present(currency=cost.currency, costMicros=cost.cost_micros) for cost in sums.costs],
        unpricedCalls=sums.unpriced,
    )


def usage(wanted: UsageFilter, found: Usage) -> dict[str, Any]:
    """Provider calls by what they were grouped by."""
    groups = [present(**_group_key(group)) | usage_total(group.total) for group in found.groups]
    told = present(**{"from": wanted.since, "to": wanted.until, "groupBy": wanted.group_by})
    return told | {"groups": groups, "more": found.more, "total": usage_total(found.total)}


def usage_total(total: UsageTotal) -> dict[str, Any]:
    """What calls came to: a cost for each currency, and none where no call has a price."""
    costs = [present(currency=cost.currency, costMicros=cost.cost_micros) for cost in total.costs]
    return {json_name(f.name): getattr(total, f.name) for f in fields(total)} | {"costs": costs}


def _group_key(group: UsageGroup) -> dict[str, Any]:
    return {json_name(f.name): getattr(group, f.name) for f in fields(group) if f.name != "total"}


def _job(job: JobRow, lang: str) -> dict[str, Any]:
    return present(
        jobId=job.id,
        jobType=job.job_type,
        lifecycleStatus=job.lifecycle_status,
        phase=job.phase,
        queueName=job.queue_name,
        priority=job.priority,
        progress=job.progress,
        attempt=job.attempt_no,
        createdAt=job.created_at,
        queuedAt=job.queued_at,
        startedAt=job.started_at,
        finishedAt=job.finished_at,
        nextAttemptAt=job.next_attempt_at,
        cancelRequestedAt=job.cancel_requested_at,
        retriedAs=job.retried_as,
        errorCode=job.error_code,
        publicErrorMessage=describe(job.error_code).message(lang) if job.error_code else None,
    )


def _artifact(artifact: Artifact) -> dict[str, Any]:
    return {"artifactType": artifact.artifact_type, "artifactId": artifact.artifact_id}


def _history(entry: HistoryEntry) -> dict[str, Any]:
    return _renamed(entry, attemptNo="attempt")


def _link(link: ChainLink) -> dict[str, Any]:
    return _renamed(link, id="jobId", attemptNo="attempt")


def _snapshot(snapshot: SnapshotDescription) -> dict[str, Any]:
    return _camel(asdict(snapshot))


def _call(call: UsageRow, usage: bool) -> dict[str, Any]:
    """A provider call; its cost is null where it has no price, never 0."""
    told = _renamed(call, attemptNo="attempt", callNo="call") | {"costMicros": call.cost_micros}
    return told if usage else {name: value for name, value in told.items() if name not in _SPENT}


def _renamed(value: Any, **names: str) -> dict[str, Any]:
    return {names.get(key, key): inner for key, inner in _camel(asdict(value)).items()}


def _camel(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields under camelCase names; ones without a value are left out."""
    return present(**{json_name(name): value for name, value in fields.items()})
