"""The users' API: their own jobs, flashcards and keys."""

from __future__ import annotations

from flask import Blueprint, Flask, Response, url_for

from aijobs.errors import ApiError
from aijobs.monitor.filters import PARAMETERS, JobFilter
from aijobs.monitor.monitor import is_id
from aijobs.monitor.views import JobView
from aijobs.web.api import credentials
from aijobs.web.api.answers import FlashcardPage, JobPage, answer, user_job
from aijobs.web.api.openapi import Operation, add_document, add_operations, build_document
from aijobs.web.context import services
from aijobs.web.requests import (
    PAGE_PARAMETERS,
    page_of,
    read_flag,
    read_idempotency_key,
    read_job_id,
    read_json_object,
    read_no_parameters,
    read_optional_object,
    read_parameters,
)
from aijobs.web.user_tokens import get_user_id

LIST_FILTERS = ("lifecycleStatus", "jobType")


def show_job(job_id: str) -> Response:
    read_no_parameters()
    return answer(user_job(_own_job(job_id)))


def list_jobs() -> Response:
    filters = {name: PARAMETERS[name][1] for name in LIST_FILTERS}
    parameters = read_parameters({**filters, **PAGE_PARAMETERS})
    wanted = JobFilter(job_type=parameters.get("jobType"), lifecycle_status=parameters.get("lifecycleStatus"))
    page = services().monitor.list_own_jobs(get_user_id(), wanted, *page_of(parameters))
    return answer(JobPage([user_job(view) for view in page.items], page.next_cursor))


def cancel_job(job_id: str) -> Response:
    strict = read_parameters({"strict": read_flag}).get("strict", False)
    read_optional_object(())
    user_id = get_user_id()
    if not is_id(job_id):
        raise ApiError("JOB_NOT_FOUND")
    services().jobs.cancel(job_id, by=f"user:{user_id}", user_id=user_id, strict=strict)
    return answer(user_job(_own_job(job_id)))


def create_flashcards() -> Response:
    read_no_parameters()
    created = services().flashcards.create(get_user_id(), read_json_object(), read_idempotency_key())
    return answer(
        user_job(_own_job(created.job.id)),
        202 if created.created else 200,
        location=url_for("user_api.show_job", job_id=created.job.id),
    )


def list_flashcards() -> Response:
    found = services().flashcards.find(get_user_id(), read_job_id())
    made_by = found.made_by if found.cards else None
    return answer(FlashcardPage(user_job(_own_job(found.job.id)), found.cards, made_by))


def _own_job(job_id: str) -> JobView:
    view = services().monitor.find_own_job(get_user_id(), job_id)
    if view is None:
        raise ApiError("JOB_NOT_FOUND")
    return view


OPERATIONS = (
    Operation(
        "GET",
        "/api/ai/jobs/{jobId}",
        show_job,
        "One of your jobs",
        {200: "Job"},
        errors=("UNAUTHORIZED", "JOB_NOT_FOUND", "INPUT_INVALID"),
    ),
    Operation(
        "GET",
        "/api/ai/jobs",
        list_jobs,
        "Your jobs, newest first",
        {200: "JobPage"},
        errors=("UNAUTHORIZED", "INPUT_INVALID"),
        parameters=(*LIST_FILTERS, "cursor", "limit"),
    ),
    Operation(
        "POST",
        "/api/ai/jobs/{jobId}/cancel",
        cancel_job,
        "Request the cancel of one of your jobs",
        {200: "Job"},
        errors=(
            "BAD_REQUEST",
            "UNAUTHORIZED",
            "JOB_NOT_FOUND",
            "JOB_NOT_CANCELLABLE",
            "JOB_ALREADY_CANCELLED",
            "PAYLOAD_TOO_LARGE",
            "UNSUPPORTED_MEDIA_TYPE",
            "INPUT_INVALID",
        ),
        parameters=("strict",),
        body="NoBody",
        body_required=False,
    ),
    Operation(
        "POST",
        "/api/learning/flashcards",
        create_flashcards,
        "Create flashcards from your notes; 200 if the idempotency key belongs to an existing job",
        {202: "Job", 200: "Job"},
        errors=(
            "BAD_REQUEST",
            "UNAUTHORIZED",
            "IDEMPOTENCY_KEY_REUSED",
            "PAYLOAD_TOO_LARGE",
            "UNSUPPORTED_MEDIA_TYPE",
            "INPUT_INVALID",
            "TOO_MANY_JOBS",
            "QUOTA_EXCEEDED",
            "PLATFORM_UNAVAILABLE",
        ),
        parameters=("Idempotency-Key",),
        body="FlashcardRequest",
        location=True,
    ),
    Operation(
        "GET",
        "/api/learning/flashcards",
        list_flashcards,
        "The flashcards of a job, from the newest job of its retry chain",
        {200: "FlashcardSet"},
        errors=("UNAUTHORIZED", "JOB_NOT_FOUND", "INPUT_INVALID"),
        parameters=("jobId",),
    ),
    *credentials.OPERATIONS,
)

DOCUMENT = build_document(
    "aijobs for users",
    "Request AI work, follow and cancel it; manage your own provider keys.",
    OPERATIONS,
    {"user": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
)


def init_app(app: Flask) -> None:
    """Add the user's API to `app`."""
    blueprint = Blueprint("user_api", __name__)
    # First, so that nothing is revealed without a token, and every fault is in an authenticated request.
    blueprint.before_request(_authenticate)
    add_operations(blueprint, OPERATIONS)
    app.register_blueprint(blueprint)
    add_document(app, "/api/openapi.json", lambda: DOCUMENT, "user_openapi")


def _authenticate() -> None:
    get_user_id()
