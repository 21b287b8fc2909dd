"""Build the answers of the APIs. Their fields are declared with the rows, for example in `aijobs.monitor.views`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from flask import Response, jsonify
from pydantic import Field, WithJsonSchema

from aijobs.answers import TIME, Answer, Flattened, Maybe, Time, one_of, to_json
from aijobs.credentials.service import MOST_CREDENTIALS
from aijobs.credentials.store import Credential
from aijobs.errors import describe
from aijobs.jobs.status import JobState
from aijobs.learning.flashcards import MODEL, RULES, Card
from aijobs.monitor.usage_filter import GROUPS
from aijobs.monitor.views import (
    JobDetail,
    JobRow,
    JobView,
    Providers,
    PublicJob,
    QueueStatus,
    Result,
    Usage,
    UserJob,
    Wait,
)
from aijobs.web.context import language
from aijobs.web.explanations import explain_losses
from aijobs.web.shapes import with_explanation

_SPENT = ("promptTokens", "completionTokens", "cachedTokens", "costMicros", "currency", "priceVersion")
_SPENT_TODAY = ("promptTokens", "completionTokens", "costs", "unpricedCalls")
"""Fields of provider calls for those with the right to see usage."""


@dataclass(frozen=True)
class JobPage(Answer):
    """Jobs of a user, newest first."""

    jobs: Sequence[UserJob]
    next_cursor: Maybe[str]


@dataclass(frozen=True)
class AdminJobPage(Answer):
    """Jobs, newest first."""

    jobs: Sequence[JobRow]
    next_cursor: Maybe[str]


@dataclass(frozen=True)
class FlashcardPage(Answer):
    """The cards of a job, and what made them."""

    schema_name = "FlashcardSet"

    job: UserJob
    flashcards: Sequence[Card]
    made_by: Maybe[Annotated[str, one_of((RULES, MODEL))]]


@dataclass(frozen=True)
class CredentialList(Answer):
    """The keys of a user."""

    credentials: Annotated[Sequence[Credential], Field(max_length=MOST_CREDENTIALS)]


@dataclass(frozen=True)
class QueueStatusList(Answer):
    """All job queues."""

    queues: Sequence[QueueStatus]


@dataclass(frozen=True)
class UsageReport(Flattened):
    """Provider calls by group, and the total."""

    schema_name = "Usage"
    flattened = "found"

    since: Annotated[Time | None, WithJsonSchema(TIME), Field(serialization_alias="from")]
    until: Annotated[Time | None, WithJsonSchema(TIME), Field(serialization_alias="to")]
    group_by: Annotated[str, one_of(GROUPS)]
    found: Usage


def answer(body: Answer | dict[str, Any], status: int = 200, location: str | None = None) -> Response:
    """Return a JSON answer in the request's language."""
    response = jsonify(to_json(body) if isinstance(body, Answer) else body)
    response.status_code = status
    response.headers["Content-Language"] = language()
    response.vary.add("Accept-Language")
    if location is not None:
        response.headers["Location"] = location
    return response


def no_content() -> Response:
    """Return 204."""
    return Response(status=204)


J = TypeVar("J", bound=PublicJob)


def localized(job: J) -> J:
    """Return `job` with its public error message in the reader's language."""
    return replace(job, public_error_message=describe(job.error_code).message(language()) if job.error_code else None)


def user_job(view: JobView) -> UserJob:
    """Return a job for its user."""
    job = view.job
    result = Result(job.artifact_count, view.artifacts) if job.lifecycle_status == JobState.SUCCEEDED else None
    return UserJob(localized(job), result)


def admin_detail(detail: JobDetail, wait: Wait | None, *, usage: bool) -> dict[str, Any]:
    """Return everything of a job except its content; tokens and cost only with `usage`."""
    losses = " ".join(explain_losses(detail)) or None
    waiting = with_explanation(wait) if wait else None
    body = to_json(replace(detail, job=localized(detail.job), waiting=waiting, loss_explanation=losses))
    if not usage:
        _leave_out(body["usage"], _SPENT)
        _leave_out([body], ("usageTotal", "chainTotal"))
    return body


def providers(found: Providers, *, usage: bool) -> dict[str, Any]:
    """Return all AI providers; tokens and cost only with `usage`."""
    body = to_json(found)
    if not usage:
        _leave_out([model for provider in body["providers"] for model in provider["models"]], _SPENT_TODAY)
    return body


def _leave_out(objects: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    for one in objects:
        for name in names:
            one.pop(name, None)
