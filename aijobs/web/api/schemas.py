"""The shapes of the API, as JSON Schema. A test holds real answers to them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from aijobs.ai.calling.breaker import BREAKER_WORDS
from aijobs.credentials.service import DEFAULT_LABEL, MAX_KEY, MAX_LABEL, MIN_KEY, MOST_CREDENTIALS
from aijobs.definitions.definition import QUEUES, USER_DEEPSEEK_KEY, USER_MODES
from aijobs.job_types import flashcard_generation
from aijobs.jobs.models import EVENT_TYPES
from aijobs.jobs.status import LIFECYCLE_STATUSES, PHASES
from aijobs.monitor.keyset import DEFAULT_LIMIT, MAX_LIMIT
from aijobs.monitor.usage import MOST_GROUPS
from aijobs.monitor.usage_filter import GROUPS, USUAL_DAYS
from aijobs.monitor.views import CAP, WAIT_REASONS
from aijobs.operators.audit import LONGEST_REASON
from aijobs.outbox.models import OUTBOX_STATUSES
from aijobs.screening.sensitive import FINDERS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NATURAL: Schema = {"type": "integer", "minimum": 0}
COUNT: Schema = {
    "type": "integer",
    "minimum": 0,
    "maximum": CAP,
    "description": f"Counted up to {CAP}, which stands for {CAP - 1} or more.",
}
FLAG: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time", "pattern": "Z$"}
STATUS: Schema = {"type": "string", "enum": list(LIFECYCLE_STATUSES)}
IDENTIFIER: Schema = {"type": "string", "minLength": 1, "maxLength": 255}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_JOB: dict[str, Schema] = {
    "jobId": TEXT,
    "jobType": TEXT,
    "lifecycleStatus": STATUS,
    "phase": {"type": "string", "enum": list(PHASES)},
    "queueName": {"type": "string", "enum": list(QUEUES)},
    "priority": {"type": "integer", "minimum": 0, "maximum": 100},
    "progress": {"type": "integer", "minimum": 0, "maximum": 100},
    "attempt": NATURAL,
    "createdAt": TIME,
}
_JOB_OPTIONAL: dict[str, Schema] = {
    "queuedAt": TIME,
    "startedAt": TIME,
    "finishedAt": TIME,
    "nextAttemptAt": TIME,
    "cancelRequestedAt": TIME,
    "retriedAs": TEXT,
    "errorCode": TEXT,
    "publicErrorMessage": TEXT,
}
_ADMIN_JOB: dict[str, Schema] = _JOB | {
    "userId": TEXT,
    "targetType": TEXT,
    "targetId": TEXT,
    "triggerType": {"type": "string", "enum": ["user", "admin", "system"]},
    "credentialMode": TEXT,
    "rootId": TEXT,
    "retryCount": NATURAL,
    "lostCount": NATURAL,
    "unchargedLosses": NATURAL,
    "maxRetryCount": NATURAL,
    "artifactCount": NATURAL,
    "newestJobId": TEXT,
    "newestLifecycleStatus": STATUS,
    "retryable": FLAG,
    "cancellable": FLAG,
}
_ADMIN_JOB_OPTIONAL: dict[str, Schema] = _JOB_OPTIONAL | {
    "parentJobId": TEXT,
    "lockedBy": TEXT,
    "lockUntil": TIME,
    "cancelRequestedBy": TEXT,
    "recoveredBy": TEXT,
    "retryRefusal": {"type": "string", "enum": ["not_final", "succeeded", "superseded", "unknown_job_type"]},
    "cancelRefusal": {"type": "string", "enum": ["final", "cancel_requested", "not_cancellable"]},
}
_USAGE_TOTAL: dict[str, Schema] = {
    "calls": NATURAL,
    "failedCalls": {**NATURAL, "description": "Lost ones too."},
    "lostCalls": {**NATURAL, "description": "Their worker went away before they ended."},
    "callsUnderWay": NATURAL,
    "promptTokens": NATURAL,
    "completionTokens": NATURAL,
    "cachedTokens": {**NATURAL, "description": "Part of `promptTokens`."},
    "costs": {
        "type": "array",
        "items": record({"costMicros": INTEGER}, {"currency": TEXT}),
        "description": "One for each currency, in millionths; empty where no call has a price.",
    },
    "unpricedCalls": {**NATURAL, "description": "Calls that ended, may have cost something and have no price."},
    "estimatedCalls": {**NATURAL, "description": "Calls whose tokens were counted here, not by the provider."},
    "possiblyBilledCalls": {**NATURAL, "description": "Calls that ended, and nobody knows whether they are billed."},
}
_REASON: Schema = {"type": "string", "minLength": 1, "maxLength": LONGEST_REASON}

SCHEMAS: dict[str, Schema] = {
    "Error": {
        "type": "object",
        "properties": {
            "error": record({"code": TEXT, "message": TEXT}, {"details": {"type": "object"}}),
        },
        "required": ["error"],
    },
    "Artifact": record({"artifactType": TEXT, "artifactId": TEXT}),
    "Job": record(
        _JOB,
        _JOB_OPTIONAL | {"result": record({"artifactCount": NATURAL, "artifacts": array(ref("Artifact"))})},
    ),
    "JobPage": record({"jobs": array(ref("Job"))}, {"nextCursor": TEXT}),
    "NoBody": record({}),
    "FlashcardSet": record(
        {"job": ref("Job"), "flashcards": array(ref("Flashcard"))},
        {"madeBy": {"type": "string", "enum": ["rules", "model"]}},
    ),
    "Flashcard": record(
        {
            "flashcardId": TEXT,
            "cardType": {"type": "string", "enum": ["basic", "cloze"]},
            "tags": array(TEXT),
            "difficulty": nullable(TEXT),
            "evidence": array(ref("Evidence")),
            "lang": TEXT,
            "source": record({"id": TEXT, "title": TEXT}),
            "createdAt": TIME,
        },
        {"front": TEXT, "back": TEXT, "text": TEXT, "hint": TEXT},
    ),
    "CredentialRequest": record(
        {
            "key": {
                "type": "string",
                "minLength": MIN_KEY,
                "maxLength": MAX_KEY,
                "pattern": "^[!-~]+$",
                "writeOnly": True,
                "description": "The provider's key. It is kept encrypted and never shown again.",
            }
        },
        {
            "label": {"type": "string", "minLength": 1, "maxLength": MAX_LABEL, "default": DEFAULT_LABEL},
            "mode": {"type": "string", "enum": list(USER_MODES), "default": USER_DEEPSEEK_KEY},
        },
    ),
    "Credential": record(
        {
            "credentialId": TEXT,
            "mode": {"type": "string", "enum": list(USER_MODES)},
            "label": TEXT,
            "lastFour": TEXT,
            "fingerprint": {"type": "string", "description": "Equal for equal keys of yours."},
            "createdAt": TIME,
        },
        {"lastUsedAt": {**TIME, "description": "To the hour."}},
    ),
    "CredentialList": record({"credentials": {**array(ref("Credential")), "maxItems": MOST_CREDENTIALS}}),
    "Evidence": record({"sid": TEXT, "quote": TEXT}, {"start": NATURAL, "end": NATURAL}),
    "AdminJob": record(_ADMIN_JOB, _ADMIN_JOB_OPTIONAL),
    "AdminJobPage": record({"jobs": array(ref("AdminJob"))}, {"nextCursor": TEXT}),
    "AdminJobDetail": record(
        _ADMIN_JOB
        | {
            "inputSchemaVersion": TEXT,
            "outputSchemaVersion": TEXT,
            "artifacts": array(ref("Artifact")),
            "history": array(ref("HistoryEntry")),
            "outbox": array(ref("OutboxEvent")),
            "usage": array(ref("ProviderCall")),
            "chain": array(ref("ChainLink")),
        },
        _ADMIN_JOB_OPTIONAL
        | {
            "promptVersion": TEXT,
            "credentialId": TEXT,
            "outputHash": TEXT,
            "internalErrorMessage": {"type": "string", "description": "For SUPER_ADMIN alone."},
            "snapshot": ref("Snapshot"),
            "waiting": ref("Waiting"),
            "lossExplanation": TEXT,
            "usageTotal": ref("UsageTotal"),
            "chainTotal": ref("UsageTotal"),
        },
    ),
    "Waiting": record(
        {"reason": {"type": "string", "enum": list(WAIT_REASONS)}, "explanation": TEXT},
        {"until": TIME, "breakers": array(ref("Breaker"))},
    ),
    "Snapshot": record(
        {
            "schemaVersion": TEXT,
            "contentHash": TEXT,
            "contentBytes": NATURAL,
            "redactionVersion": TEXT,
            "redactionCounts": {
                "type": "object",
                "propertyNames": {"enum": sorted({kind.lower() for kind, _ in FINDERS})},
                "additionalProperties": {"type": "integer", "minimum": 1},
                "description": "How often each redaction rule found something; rules that found nothing are left out.",
            },
            "expiresAt": TIME,
        }
    ),
    "HistoryEntry": record(
        {
            "seq": NATURAL,
            "type": {"type": "string", "enum": list(EVENT_TYPES)},
            "attempt": NATURAL,
            "actor": TEXT,
            "at": TIME,
        },
        {"instance": TEXT, "errorCode": TEXT, "durationMs": INTEGER},
    ),
    "ProviderCall": record(
        {
            "attempt": NATURAL,
            "call": NATURAL,
            "state": {"type": "string", "enum": ["started", "done", "failed", "lost"]},
            "provider": TEXT,
            "model": TEXT,
            "credentialMode": TEXT,
            "estimated": FLAG,
            "billed": {"type": "string", "enum": ["yes", "no", "unknown"]},
            "startedAt": TIME,
        },
        {
            "promptTokens": NATURAL,
            "completionTokens": NATURAL,
            "cachedTokens": NATURAL,
            "costMicros": {**nullable(INTEGER), "description": "Millionths of `currency`; null: no price is known."},
            "currency": TEXT,
            "priceVersion": TEXT,
            "latencyMs": NATURAL,
            "finishReason": TEXT,
            "errorCode": TEXT,
            "httpStatus": NATURAL,
            "requestId": {**TEXT, "description": "The provider's own name for the call."},
            "finishedAt": TIME,
        },
    ),
    "ChainLink": record(
        {"jobId": TEXT, "lifecycleStatus": STATUS, "attempt": NATURAL, "createdAt": TIME},
        {"parentJobId": TEXT, "errorCode": TEXT, "finishedAt": TIME},
    ),
    "OutboxEvent": record(
        {
            "eventId": TEXT,
            "eventType": TEXT,
            "jobId": TEXT,
            "status": {"type": "string", "enum": list(OUTBOX_STATUSES)},
            "attemptCount": NATURAL,
            "availableAt": TIME,
            "redrives": NATURAL,
            "createdAt": TIME,
            "requeueable": FLAG,
        },
        {
            "queueName": TEXT,
            "lockedBy": TEXT,
            "lockedAt": TIME,
            "publishedAt": TIME,
            "lastSentAt": TIME,
            "lastError": TEXT,
        },
    ),
    "RevealRequest": record({"reason": _REASON}),
    "ReasonRequest": record({}, {"reason": _REASON}),
    "Revealed": record({"jobId": TEXT}, {"snapshot": {}, "validatedOutput": {}}),
    "QueueStatusList": record({"queues": array(ref("QueueStatus"))}),
    "QueueStatus": record(
        {
            "queueName": TEXT,
            "brokerDepth": nullable(NATURAL),
            "waiting": NATURAL,
            "queued": COUNT,
            "retrying": COUNT,
            "active": COUNT,
            "workers": nullable(NATURAL),
        },
        {
            "oldestQueuedAt": TIME,
            "oldestAgeMs": NATURAL,
            "paused": record({"reason": TEXT, "by": TEXT, "at": TIME}),
        },
    ),
    "OutboxStatus": record(
        {
            "counts": record(dict.fromkeys(OUTBOX_STATUSES, COUNT)),
            "lagMs": NATURAL,
            "dead": array(ref("OutboxEvent")),
            "unknownTypes": array(ref("OutboxEvent")),
        },
        {"oldestPendingAt": TIME},
    ),
    "WorkerList": record({"brokerAway": FLAG, "workers": array(ref("Worker"))}),
    "Worker": record(
        {
            "instanceId": TEXT,
            "queueName": TEXT,
            "host": TEXT,
            "state": {"type": "string", "enum": ["live", "late", "lost", "unknown"]},
            "activeJobCount": NATURAL,
            "activeJobIds": array(TEXT),
            "holds": array(
                record(
                    {"id": TEXT, "jobType": TEXT, "queueName": TEXT, "attemptNo": NATURAL},
                    {"lockUntil": TIME},
                )
            ),
        },
        {"pid": NATURAL, "startedAt": TIME, "heartbeatAgeMs": NATURAL},
    ),
    "ProviderList": record({"day": TIME, "providers": array(ref("Provider"))}),
    "Provider": record(
        {
            "name": TEXT,
            "key": {"type": "string", "enum": ["yes", "no", "not_needed"]},
            "breaker": ref("Breaker"),
            "models": array(ref("ProviderModel")),
        },
        {
            "host": TEXT,
            "callLimit": {"type": "integer", "minimum": 1, "description": "Left out where there is none."},
            "callsInFlight": {"type": "integer", "minimum": 0, "description": "Left out while Redis can't tell."},
        },
    ),
    "Breaker": record(
        {
            "scope": TEXT,
            "state": {"type": "string", "enum": list(BREAKER_WORDS)},
            "failures": NATURAL,
            "opened": NATURAL,
            "probing": FLAG,
        },
        {"openForMs": NATURAL, "since": TIME, "why": TEXT},
    ),
    "ProviderModel": record(
        {"model": TEXT, "calls": NATURAL, "failedCalls": NATURAL, "callsUnderWay": NATURAL},
        {
            "medianLatencyMs": NATURAL,
            "promptTokens": NATURAL,
            "completionTokens": NATURAL,
            "costs": array(record({"costMicros": INTEGER}, {"currency": TEXT})),
            "unpricedCalls": NATURAL,
        },
    ),
    "Usage": record(
        {
            "from": TIME,
            "to": TIME,
            "groupBy": {"type": "string", "enum": list(GROUPS)},
            "groups": array(ref("UsageGroup")),
            "more": {**FLAG, "description": f"Whether there are more than {MOST_GROUPS} groups."},
            "total": ref("UsageTotal"),
        }
    ),
    "UsageGroup": record(
        _USAGE_TOTAL,
        {
            "day": {"type": "string", "format": "date"},
            "jobType": TEXT,
            "provider": TEXT,
            "model": TEXT,
            "userId": TEXT,
        },
    ),
    "UsageTotal": record(_USAGE_TOTAL),
}


def _add_input(name: str, model: type[BaseModel]) -> None:
    """A job type's input, and what it is made of, under their own names."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    SCHEMAS.update(schema.pop("$defs", {}))
    SCHEMAS[name] = schema


_add_input("FlashcardRequest", flashcard_generation.DEFINITION.input.schema)
SCHEMAS["FlashcardRequest"]["properties"]["credentialId"] = {
    **TEXT,
    "description": "A key of your own that the work runs on; without it, the platform's.",
}


def _query(schema: Schema, description: str, *, required: bool = False) -> dict[str, Any]:
    return {"in": "query", "required": required, "description": description, "schema": schema}


PARAMETERS: dict[str, dict[str, Any]] = {
    "jobType": _query(TEXT, "A job type; hyphens stand for underscores."),
    "lifecycleStatus": _query(STATUS, "The stored state."),
    "status": _query(STATUS, "Another name of lifecycleStatus."),
    "queueName": _query({"type": "string", "enum": list(QUEUES)}, "The queue."),
    "userId": _query(IDENTIFIER, "The user, exactly."),
    "errorCode": _query({"type": "string", "pattern": "^[A-Z][A-Z0-9_]{0,63}$"}, "The job's error code."),
    "createdFrom": _query(TEXT, "ISO 8601: created then or later; UTC where no offset is given."),
    "createdTo": _query(TEXT, "ISO 8601: created before then; a date stands for its whole day."),
    "q": _query(IDENTIFIER, "The start of a job id, user id or target id."),
    "unresolved": _query(FLAG, "Failed jobs that nothing was retried after."),
    "cursor": _query(TEXT, "`nextCursor` of the page before."),
    "limit": _query(
        {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}, "The page's length."
    ),
    "strict": _query(FLAG, "Answer 409 for a job that is final, instead of 200."),
    "jobId": _query(TEXT, "The job that made the cards, or one that it was retried from.", required=True),
    "from": _query(TEXT, f"ISO 8601; by default the begin of the {USUAL_DAYS} UTC days that end with `to`."),
    "to": _query(TEXT, "ISO 8601: before then, a date stands for its whole day; by default the end of this UTC day."),
    "groupBy": _query({"type": "string", "enum": list(GROUPS), "default": "day"}, "What is summed up together."),
    "Idempotency-Key": {
        "in": "header",
        "required": False,
        "description": "Repeating a request with its key leads to the same job.",
        "schema": IDENTIFIER,
    },
}
