"""The JSON Schemas of the API's bodies and parameters. A test checks real answers against them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from aijobs.answers import to_schemas
from aijobs.credentials.service import DEFAULT_LABEL, MAX_KEY, MAX_LABEL, MIN_KEY
from aijobs.definitions.definition import QUEUES, USER_DEEPSEEK_KEY, USER_MODES
from aijobs.job_types import flashcard_generation
from aijobs.jobs.status import JobState
from aijobs.monitor.keyset import DEFAULT_LIMIT, MAX_LIMIT
from aijobs.monitor.usage_filter import GROUPS, USUAL_DAYS
from aijobs.monitor.views import JobDetail, OutboxStatus, Providers, Workers
from aijobs.operators.audit import LONGEST_REASON
from aijobs.web.api.answers import (
    AdminJobPage,
    CredentialList,
    FlashcardPage,
    JobPage,
    QueueStatusList,
    UsageReport,
)

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
STATUS: Schema = {"type": "string", "enum": list(JobState)}
IDENTIFIER: Schema = {"type": "string", "minLength": 1, "maxLength": 255}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """Return the schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


_REASON: Schema = {"type": "string", "minLength": 1, "maxLength": LONGEST_REASON}

SCHEMAS: dict[str, Schema] = to_schemas(
    (
        *(JobPage, FlashcardPage, CredentialList, AdminJobPage, JobDetail, QueueStatusList, OutboxStatus, Workers),
        *(Providers, UsageReport),
    )
) | {
    "Error": {
        "type": "object",
        "properties": {
            "error": record({"code": TEXT, "message": TEXT}, {"details": {"type": "object"}}),
        },
        "required": ["error"],
    },
    "NoBody": record({}),
    "CredentialRequest": record(
        {
            "key": {
                "type": "string",
                "minLength": MIN_KEY,
                "maxLength": MAX_KEY,
                "pattern": "^[!-~]+$",
                "writeOnly": True,
                "description": "The provider's key. It is stored encrypted and never shown again.",
            }
        },
        {
            "label": {"type": "string", "minLength": 1, "maxLength": MAX_LABEL, "default": DEFAULT_LABEL},
            "mode": {"type": "string", "enum": list(USER_MODES), "default": USER_DEEPSEEK_KEY},
        },
    ),
    "RevealRequest": record({"reason": _REASON}),
    "ReasonRequest": record({}, {"reason": _REASON}),
    "Revealed": record({"jobId": TEXT}, {"snapshot": {}, "validatedOutput": {}}),
}
"""The bodies of requests by name. Answers have declarations of their own."""


def _add_input(name: str, model: type[BaseModel]) -> None:
    """Add a job type's input and its parts under their own names."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    SCHEMAS.update(schema.pop("$defs", {}))
    SCHEMAS[name] = schema


_add_input("FlashcardRequest", flashcard_generation.DEFINITION.input.schema)
SCHEMAS["FlashcardRequest"]["properties"]["credentialId"] = {
    **TEXT,
    "description": "The id of your own key for this job; by default the platform's key is used.",
}


def _query(schema: Schema, description: str, *, required: bool = False) -> dict[str, Any]:
    return {"in": "query", "required": required, "description": description, "schema": schema}


PARAMETERS: dict[str, dict[str, Any]] = {
    "jobType": _query(TEXT, "A job type; hyphens are read as underscores."),
    "lifecycleStatus": _query(STATUS, "The stored state."),
    "status": _query(STATUS, "Alias of lifecycleStatus."),
    "queueName": _query({"type": "string", "enum": list(QUEUES)}, "The queue."),
    "userId": _query(IDENTIFIER, "The whole user id."),
    "errorCode": _query({"type": "string", "pattern": "^[A-Z][A-Z0-9_]{0,63}$"}, "The job's error code."),
    "createdFrom": _query(TEXT, "ISO 8601: created at or after this time; UTC without an offset."),
    "createdTo": _query(TEXT, "ISO 8601: created before this time; a date includes its whole day."),
    "q": _query(IDENTIFIER, "The start of a job id, user id or target id."),
    "unresolved": _query(FLAG, "true: only failed jobs that were not retried."),
    "cursor": _query(TEXT, "`nextCursor` of the previous page."),
    "limit": _query(
        {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        "Maximum number of items on the page.",
    ),
    "strict": _query(FLAG, "true: answer 409 instead of 200 if the job has already ended."),
    "jobId": _query(TEXT, "The id of any job of the retry chain.", required=True),
    "from": _query(TEXT, f"ISO 8601; by default the start of the {USUAL_DAYS} UTC days that end with `to`."),
    "to": _query(TEXT, "ISO 8601: before this time; a date includes its whole day; by default the end of today (UTC)."),
    "groupBy": _query({"type": "string", "enum": list(GROUPS), "default": "day"}, "How calls are grouped."),
    "Idempotency-Key": {
        "in": "header",
        "required": False,
        "description": "A repeated request with the same key returns the same job.",
        "schema": IDENTIFIER,
    },
}
